"""An environment with two agents: a fixed critic speaks first, then the solver that is trained."""

from __future__ import annotations

import verifiers.v1 as vf
from bench_env import BenchConfig, BenchTaskset


class DuoConfig(vf.EnvConfig):
    critic: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class DuoEnv(vf.Env[DuoConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.critic.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.critic.run(task)
        await agents.solver.run(task)


class DuoTaskset(BenchTaskset):
    """The bench tasks."""


__all__ = ["BenchConfig", "DuoEnv", "DuoTaskset"]
