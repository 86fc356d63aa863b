"""The agents that people use, unchanged, as harnesses of coding tasks: their program runs in the task's sandbox.

    [orchestrator.source.harness]
    id = "orchestrator.coding.native"
    program = "codex"

    program --(its own dialect, loopback)--> interception --> client --> gateway --> inference node

npm installs a program once per machine, into the image of the sandboxes (python_image.py). It starts with an empty home
and reaches the policy only. Updates, telemetry and questions are off: nobody is there to answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar, Literal

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

HOME = "/tmp/home"
PROVIDER = "composer"
PACKAGES = {
    "claude_code": "npm:@anthropic-ai/claude-code@2.1.328",
    "codex": "npm:@openai/codex@0.169.0",
    "opencode": "npm:opencode-ai@1.18.33",
    "qwen_code": "npm:@qwen-code/qwen-code@0.24.4",
}
"""The releases that the tests play."""
Start = tuple[list[str], dict[str, str]]
"""Words and variables that start a program."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str
    """Ends in /v1."""
    key: str
    model: str


def _claude_code(endpoint: Endpoint, system: str, prompt: str) -> Start:
    more = ["--append-system-prompt", system] if system else []
    env = {
        "ANTHROPIC_BASE_URL": endpoint.url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    return (["claude", "-p", prompt, "--dangerously-skip-permissions", *more], env)


def _codex(endpoint: Endpoint, system: str, prompt: str) -> Start:
    provider = {
        "name": PROVIDER, "base_url": endpoint.url, "wire_api": "responses", "env_key": "OPENAI_API_KEY",
        "request_max_retries": 0, "stream_max_retries": 0,
    }  # fmt: skip
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in provider.items())
    settings = {
        "model": json.dumps(endpoint.model),
        "model_provider": json.dumps(PROVIDER),
        f"model_providers.{PROVIDER}": f"{{ {table} }}",
        "developer_instructions": json.dumps(system),
        "features": "{ apps = false, plugins = false, multi_agent = false, multi_agent_v2 = { enabled = false } }",
        "web_search": json.dumps("disabled"),
    }
    words = [word for key, value in settings.items() if value != '""' for word in ("-c", f"{key}={value}")]
    argv = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *words, prompt]
    return (argv, {"OPENAI_API_KEY": endpoint.key})


def _qwen_code(endpoint: Endpoint, system: str, prompt: str) -> Start:
    more = ["--append-system-prompt", system] if system else []
    env = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}
    return (["qwen", "-p", prompt, "--yolo", *more], env)


def _opencode(endpoint: Endpoint, system: str, prompt: str) -> Start:
    options = {"baseURL": endpoint.url, "apiKey": endpoint.key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {endpoint.model: {}}}
    config = {"provider": {PROVIDER: provider}, "model": f"{PROVIDER}/{endpoint.model}", "autoupdate": False}
    text = f"{system}\n\n{prompt}" if system else prompt
    return (["opencode", "run", text], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


STARTS = {"claude_code": _claude_code, "codex": _codex, "opencode": _opencode, "qwen_code": _qwen_code}


class NativeConfig(vf.HarnessConfig):
    """A native agent."""

    program: Literal["claude_code", "codex", "opencode", "qwen_code"]
    """The agent."""

    @property
    def packages(self) -> list[str]:
        """What the image of the sandboxes needs."""
        return [PACKAGES[self.program]]


class NativeAgent(vf.Harness[NativeConfig]):
    """Starts the program once, and takes its end for the end of the rollout."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        argv, env = STARTS[self.config.program](Endpoint(endpoint, secret, ctx.model), system or "", prompt or "")
        await runtime.run(["mkdir", "-p", HOME], {})
        return await runtime.run_program(argv, {"HOME": HOME, **env, **self.config.resolved_env})


__all__ = ["NativeAgent"]
