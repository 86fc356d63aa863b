"""The agents that people use, unchanged, as harnesses of coding tasks: their program runs in the task's sandbox.

    [orchestrator.source.harness]
    id = "orchestrator.coding.native"
    program = "codex"

    program --(its own dialect, loopback)--> interception --> client --> gateway --> inference node

npm installs a program once per machine, into the image of the sandboxes (python_image.py). It starts with an empty home
and reaches the policy only. Updates, telemetry and questions are off: nobody is there to answer.
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
import time
from dataclasses import dataclass
from typing import ClassVar, Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.errors import ProviderError
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.trace import Error

from orchestrator.coding.sandbox.isolation import NPM_FOLDER
from orchestrator.workers.dialects import UnreadableError

_CONTEXT_FULL = re.compile(r"context length|context window|max_model_len", re.IGNORECASE)
_REFUSED = 5
"""Calls in a row that failed, and refusals among twice as many."""
_SIGNALLED = 128
"""Least exit status of a program that a signal ended; also that of a box that is gone."""
_LOOK_S, _IDLE_S, _LEAVE_S = 2.0, 60.0, 10.0
"""Between two looks at a rollout, without a call after a refused one, and for a program to leave once it is over."""
_ASKS_ON = "the program went on after its rollout was over, and was ended"
_SAID_CHARS = 1500
HOME = "/tmp/home"
PROVIDER = "composer"
PACKAGES = {
    "claude_code": "npm:@anthropic-ai/claude-code@2.1.328",
    "codex": "npm:@openai/codex@0.169.0",
    "opencode": "npm:opencode-ai@1.18.33",
    "qwen_code": "npm:@qwen-code/qwen-code@0.24.4",
}
"""The releases that the tests play."""
Start = tuple[list[str], list[str], dict[str, str]]
"""Words that start a program, the last of them, and variables. More options go between: a prompt may begin with -."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEndpoint:
    url: str
    """Ends in /v1."""
    key: str
    model: str
    context: int
    """Most tokens of a prompt and its answer; programs compact their history before."""
    answer: int
    """Most tokens of an answer."""


def _placed(package: str, program: str) -> str:
    """Return the path of a program that a script of npm's, which does not run, would put in its place."""
    kind = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{NPM_FOLDER}/node_modules/{package}-linux-{kind}/{program}"


def _claude_code(endpoint: PolicyEndpoint, system: str, prompt: str) -> Start:
    more = ["--append-system-prompt", system] if system else []
    env = {
        "ANTHROPIC_BASE_URL": endpoint.url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
        "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(endpoint.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(endpoint.answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return (
        [_placed("@anthropic-ai/claude-code", "claude"), "-p", "--dangerously-skip-permissions", *more],
        ["--", prompt],
        env,
    )


def _codex(endpoint: PolicyEndpoint, system: str, prompt: str) -> Start:
    provider = {
        "name": PROVIDER, "base_url": endpoint.url, "wire_api": "responses", "env_key": "OPENAI_API_KEY",
        "request_max_retries": 0, "stream_max_retries": 0,
    }  # fmt: skip
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in provider.items())
    settings = {
        "model": json.dumps(endpoint.model),
        "model_provider": json.dumps(PROVIDER),
        "model_context_window": str(endpoint.context),
        f"model_providers.{PROVIDER}": f"{{ {table} }}",
        "developer_instructions": json.dumps(system),
        "features": "{ apps = false, plugins = false, multi_agent = false, multi_agent_v2 = { enabled = false } }",
        "features.view_image": "false",
        "web_search": json.dumps("disabled"),
    }
    words = [word for key, value in settings.items() if value != '""' for word in ("-c", f"{key}={value}")]
    argv = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *words]
    return argv, ["--", prompt], {"OPENAI_API_KEY": endpoint.key}


def _qwen_code(endpoint: PolicyEndpoint, system: str, prompt: str) -> Start:
    more = ["--append-system-prompt", system] if system else []
    env = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}
    return ["qwen", "--yolo", *more], [f"--prompt={prompt}"], env


def _opencode(endpoint: PolicyEndpoint, system: str, prompt: str) -> Start:
    options = {"baseURL": endpoint.url, "apiKey": endpoint.key}
    limit = {"context": endpoint.context, "output": endpoint.answer}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {endpoint.model: {"limit": limit}}}
    config = {"provider": {PROVIDER: provider}, "model": f"{PROVIDER}/{endpoint.model}", "autoupdate": False}
    text = f"{system}\n\n{prompt}" if system else prompt
    return [_placed("opencode", "bin/opencode"), "run"], ["--", text], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


STARTS = {"claude_code": _claude_code, "codex": _codex, "opencode": _opencode, "qwen_code": _qwen_code}


class NativeConfig(vf.HarnessConfig):
    """A native agent."""

    program: Literal["claude_code", "codex", "opencode", "qwen_code"]
    """The agent."""
    args: list[str] = Field(default_factory=list)
    """More words of its command line, such as ["--tools", "Bash"] for Claude Code."""
    max_turns: int = 100
    """Answers of the policy after which the rollout stops, finished or not."""
    max_context: int = 32_768
    """Context that the program is told, in tokens; a run gives model.max_context."""

    @property
    def packages(self) -> list[str]:
        """What the image of the sandboxes needs."""
        return [PACKAGES[self.program]]


class NativeAgent(vf.Harness[NativeConfig]):
    """Starts the program once. Its end is the rollout's end, whatever its exit status."""

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
        place = PolicyEndpoint(
            url=endpoint,
            key=secret,
            model=ctx.model,
            context=self.config.max_context,
            answer=ctx.sampling.max_tokens or self.config.max_context // 4,
        )
        first, last, env = STARTS[self.config.program](place, system or "", prompt or "")
        await runtime.run(["mkdir", "-p", HOME], {})
        words, variables = [*first, *self.config.args, *last], {"HOME": HOME, **env, **self.config.resolved_env}
        running = asyncio.ensure_future(runtime.run_program(words, variables))
        try:
            while not running.done() and not _is_over(trace):
                await asyncio.wait({running}, timeout=_LOOK_S)
            await asyncio.wait({running}, timeout=_LEAVE_S)
            result = running.result() if running.done() else ProgramResult(exit_code=1, stdout="", stderr=_ASKS_ON)
        finally:
            running.cancel()
            await asyncio.wait({running})
        return _outcome(trace, result, self.config.max_context)


def _is_over(trace: vf.Trace) -> bool:
    """Tell whether the policy answers no more: programs may ask on for ever, or wait after a refusal."""
    last = trace.calls[-_REFUSED:]
    if trace.stop_condition is not None or len(_refusals(trace)) >= _REFUSED:
        return True
    if not last or last[-1].error is None:
        return False
    return all(call.error for call in last) and (len(last) == _REFUSED or time.time() - last[-1].time.end > _IDLE_S)


def _refusals(trace: vf.Trace) -> list[Error]:
    """Return those among the last calls: a program may compact its history after each, in vain."""
    errors = [call.error for call in trace.calls[-2 * _REFUSED :]]
    return [error for error in errors if error is not None and _refusal(error)]


def _refusal(error: Error) -> str | None:
    """Name why the policy refused what its own turns may have led to; None for a failure."""
    if error.status_code in (400, 413) and _CONTEXT_FULL.search(error.message):
        return "context_full"
    return "unreadable" if error.type == UnreadableError.__name__ else None


def _outcome(trace: vf.Trace, result: ProgramResult, max_context: int) -> ProgramResult:
    """Say what the program's end means: a rollout is scored as it stands, unless the policy could not be asked.

    Raises ProviderError where it was refused from the first prompt with tools on.
    """
    refusals, error = _refusals(trace), trace.calls[-1].error if trace.calls else None
    error = refusals[-1] if len(refusals) >= _REFUSED else error
    refusal = None if error is None else _refusal(error)
    if error is not None and refusal and not any(branch.nodes[0].tools for branch in trace.branches):
        raise ProviderError(error.message, status_code=400)
    if trace.num_turns and result.exit_code < _SIGNALLED and (refusal or error is None or not result.exit_code):
        if refusal or result.exit_code:
            trace.stop(refusal or f"exit_{result.exit_code}")
        return result
    said = f"{result.stderr}\n{result.stdout}".rstrip()[-_SAID_CHARS:]  # Many say on stdout what is wrong.
    if not trace.calls:
        said += f"\nIt never asked the policy, whose context has {max_context} tokens"
    return ProgramResult(exit_code=result.exit_code or 1, stdout="", stderr=said)


__all__ = ["NativeAgent"]
