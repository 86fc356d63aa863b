"""A third party's environment: its own Env, task and harness classes, and a task set that never ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf
from bench_env import BenchHarness, BenchHarnessConfig


class OwnConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class OwnEnv(vf.Env[OwnConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.player.run(task)


class Round(vf.Task[vf.TaskData]):
    @vf.reward
    async def number(self, trace: vf.Trace) -> float:
        return 1 + int(self.data.name.removeprefix("round-")) / 100


class OwnTaskset(vf.Taskset[Round, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[Round]:
        for index in itertools.count():
            yield Round(vf.TaskData(prompt=f"play {index}", name=f"round-{index}"), self.config.task)


__all__ = ["BenchHarness", "BenchHarnessConfig", "OwnEnv", "OwnTaskset"]
