"""Agents that people use, in a sandbox: their programs drive the policy, and the tokens that it sampled are trained."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from code_tasks_made import STUB, make_folder, make_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime.channels.policy import PolicyConfig, PolicyTerm
from composer_prime.cli.served_model import serve_with_workers
from composer_prime.config import Config
from composer_prime.config.sandbox import RuntimeConfig
from composer_prime.errors import SandboxError
from composer_prime.packing.pack import pack
from composer_prime.run.keys import RunKeys
from composer_prime.run.weights import WeightStore
from composer_prime.wire.node_messages import Generate, Sampled
from composer_prime.wire.types import Sample, VersionSpan, flags, floats, ints, pack_floats, pack_ints
from inference.engines.local.model import KvCache
from orchestrator.coding.native import PACKAGES
from orchestrator.coding.sandbox.box import open_box
from orchestrator.coding.task import CodeTask
from orchestrator.gateway import Gateway
from orchestrator.rollouts.groups import GroupPlan, score_group
from orchestrator.rollouts.rollout import Permits, RolloutRunner, compile_rollout, finished_rollout
from orchestrator.tasks import source_spec
from orchestrator.workers.pool import RolloutReply, WorkerPool
from tests.gateway.node_peer import PeerNode
from tests.scripted_node import POLICY, call
from trainer.data import checked_row, unpack
from trainer.model.policy_model import Policy

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]

CONTEXT = 65_536
"""The tiny model has 1,024 places; here it gets more, untrained ones. An agent's tools alone fill 50,000 characters."""
SUMMARY_ASKED = "Tool calls will be rejected"
"""Claude Code's words when it compacts."""
EDIT = f"sed -i 's/{STUB}/    return sum(values)/' demo/numbers.py"
MINI_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
"""litellm has its prices in the package, and a full context is no reason to ask ten times."""
AGENTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "mini_swe_agent": (
        {"id": "mini_swe_agent", "env": MINI_ENV},
        ["mini-swe-agent"],
        [call("bash", command=word) for word in ("ls", EDIT, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
    ),
    "claude_code": ({}, [], [call("Bash", command=word, description="run") for word in ("ls", EDIT)] + ["Done."]),
    "codex": ({}, [], [call("exec_command", cmd=word) for word in ("ls", EDIT)] + ["Done."]),
    "opencode": ({}, [], [call("bash", command=word, description="run") for word in ("ls", EDIT)] + ["Done."]),
    "qwen_code": (
        {},
        [],
        [call("read_file", file_path="/work/demo/numbers.py"), call("run_shell_command", command=EDIT), "Done."],
    ),
}
"""Harness, packages, and the turns of a policy that solves the task."""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "model"
    shutil.copytree(POLICY, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    yield folder


def configuration(agent: str, model: Path, tasks: Path, context: int, settings: dict[str, Any]) -> Config:
    """The recipe of the documentation: the program's packages are for its own sandbox only, not for grading."""
    harness, packages, _ = AGENTS[agent]
    taskset = {"id": "orchestrator.coding.code", "folder": str(tasks), "split": "all", "instruction": ""}
    source = {
        "name": "code",
        "taskset": {**taskset, "runtime": {"type": "bubblewrap"}},
        "harness": harness or {"id": "orchestrator.coding.native", "program": agent, **settings},
        "runtime": {"type": "bubblewrap", "packages": packages, "limits": {"memory_gb": 4.0, "processes": 512}},
        "timeout_s": 500.0,
    }
    return Config.model_validate(
        {
            "run": {"name": "program"},
            "model": {"path": str(model), "max_context": context},
            "trainer": {"micro_batch_tokens": context},
            "orchestrator": {"source": [source], "sampling": {"max_tokens": 160}},
        }
    )


async def play(
    config: Config, gateway: Gateway, pool: WorkerPool, task_index: int
) -> tuple[RolloutReply, list[Sample]]:
    """One rollout as a run plays it, and the samples that a trainer would get."""
    runner = RolloutRunner(
        config=config.orchestrator, gateway=gateway, pools={"code": pool}, permits=Permits(1), seed=0
    )
    plan = GroupPlan(group=task_index, source="code", task_index=task_index, seed=0, size=1)
    reply, records = await runner.run("code", runner.training_request(plan, 0, 0), order=0)
    return reply, compile_rollout(plan, reply, records)


Turn = tuple[list[int], list[int], bool]
"""Prompt, sampled tokens, and whether the prompt has tools."""


async def play_scripted(
    agent: str, folder: Path, model: Path, script: list[str], *tasks: CodeTask, context: int = CONTEXT, **settings: Any
) -> tuple[list[tuple[RolloutReply, list[Sample]]], list[Turn]]:
    """Play the tasks with a policy that says the next text of `script` wherever it is offered tools."""
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY)
    turns: list[Turn] = []
    left = iter(script)

    def answer(request: Generate) -> Sampled:
        prompt = ints(request.prompt_ids).tolist()
        words = tokenizer.decode(prompt)
        works = "<tools>" in words
        text = next(left, "Done.") if works else "A title"
        if SUMMARY_ASKED in words[-200:]:
            text = "<summary>Total is still to be written.</summary>"
        ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        turns.append((prompt, ids, works))
        return Sampled(
            request_id=request.request_id,
            lease=request.lease,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.01 * place for place in range(len(ids))]),
            version_spans=[VersionSpan(0, len(ids), 0)],
            finish_reason="stop",
        )

    made, keys = make_folder(folder / "tasks", *tasks), RunKeys.create(folder / "keys")
    config = configuration(agent, model, made, context, settings)
    gateway = Gateway(config, keys, "run", WeightStore(folder / "weights"), model_dir=model)
    spec = source_spec(config.orchestrator.source[0], config, model)
    pool = WorkerPool(spec, workers=1, start_timeout_s=600.0, log_dir=folder / "logs")
    try:
        await asyncio.gather(gateway.start(), pool.start())
        async with PeerNode(gateway.node_endpoint, keys.client("node"), "node-0", answer=answer):
            played = [await play(config, gateway, pool, index) for index in range(len(tasks) or 1)]
    finally:
        await pool.close()
        await gateway.close()
    return played, turns


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The agent of the test; it is skipped where its program or bubblewrap is missing. The first use installs it."""
    agent = request.param
    monkeypatch.setenv("COMPOSER_GATEWAY_TOKEN", "token-of-this-test")
    packages = AGENTS[agent][1] or [PACKAGES[agent]]

    async def open_and_close() -> None:
        await (await open_box(RuntimeConfig(type="bubblewrap", packages=packages))).close()

    try:
        asyncio.run(open_and_close())
    except SandboxError as error:
        pytest.skip(f"needs {packages[0]} and bubblewrap: {error}")
    return agent


# The program reads, edits and ends, and the task is solved. Each prompt extends the tokens before it, so all turns that
# have tools are one sample. Its tokens are those that the node saw, and those that it sampled are trained, once, with
# their logprobs. A side call, such as for a title, is marked, and is a sample of its own.
@pytest.mark.parametrize("installed", AGENTS, indirect=True)
def test_its_tokens_are_those_that_the_node_sampled(tmp_path: Path, model: Path, installed: str) -> None:
    [(reply, samples)], turns = asyncio.run(play_scripted(installed, tmp_path, model, AGENTS[installed][2]))
    assert reply.failure is None and reply.reward == 1.0, reply
    main = [(prompt, ids) for prompt, ids, works in turns if works]
    assert len(main) == 3 and len(samples) == 1 + len(turns) - len(main)
    assert sum(turn.on_side for turn in reply.turns) == len(turns) - len(main)
    sample = max(samples, key=lambda each: len(ints(each.input_ids)))
    seen = main[-1][0] + main[-1][1]
    assert ints(sample.input_ids).tolist() == seen
    mask, logprobs = np.zeros(len(seen), bool), np.zeros(len(seen), np.float32)
    for prompt, ids in main:
        assert seen[: len(prompt) + len(ids)] == prompt + ids
        mask[len(prompt) : len(prompt) + len(ids)] = True
        logprobs[len(prompt) : len(prompt) + len(ids)] = -0.01 * np.arange(len(ids))
    assert np.array_equal(flags(sample.loss_mask), mask)
    assert np.array_equal(floats(sample.logprobs), logprobs)
    assert sum(flags(each.loss_mask).sum() for each in samples) == sum(len(ids) for _, ids, _ in turns)


# A policy that says it is done earns nothing: what the program does by itself solves no task.
@pytest.mark.parametrize("installed", ["claude_code", "codex", "opencode", "qwen_code"], indirect=True)
def test_a_policy_that_does_nothing_earns_nothing(tmp_path: Path, model: Path, installed: str) -> None:
    [(reply, _)], _ = asyncio.run(play_scripted(installed, tmp_path, model, []))
    assert reply.failure is None and reply.reward == 0.0, reply


# A first prompt beyond the context fails the rollout with the tokens of its parts, and no program asks on for ever:
# OpenCode would compact its empty history, and ask again.
@pytest.mark.parametrize("installed", ["claude_code", "codex", "opencode", "qwen_code"], indirect=True)
def test_a_context_that_is_too_small_is_named(tmp_path: Path, model: Path, installed: str) -> None:
    [(reply, _)], turns = asyncio.run(play_scripted(installed, tmp_path, model, [], context=8192))
    assert reply.failure is not None and reply.failure.kind == "context_overflow" and not reply.failure.retryable
    assert re.search(r"\(8192\); its tokens are \d+ of system, \d+ of tools, \d+ of history", reply.failure.message)
    assert len(turns) < 30


# The local engine samples for Claude Code with a short tool list. The trainer's own model gives the recorded tokens the
# recorded logprobs, to a hundred thousandth of their size, both in float32.
@pytest.mark.parametrize("installed", ["claude_code"], indirect=True)
async def test_the_trainer_gives_sampled_tokens_their_logprobs(tmp_path: Path, model: Path, installed: str) -> None:
    settings = {"args": ["--tools", "Bash", "--system-prompt", "You are a programmer."]}
    tasks = make_folder(tmp_path / "tasks", *(make_task(id=f"task-{number}") for number in range(3)))
    config = configuration(installed, model, tasks, CONTEXT, settings)
    async with serve_with_workers(config, tmp_path / "run") as (gateway, pools):
        played = [await play(config, gateway, pools["code"], index) for index in range(3)]
    assert [reply.failure for reply, _ in played] == [None] * 3
    samples = [sample for _, samples in played for sample in samples]
    (batches,) = pack(samples, (), run_id="r", step=1, world_size=1, max_tokens=CONTEXT)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="composer_packed")
    policy = Policy(lm, "composer_packed")
    for batch in batches:
        row = unpack(checked_row(batch, policy.vocabulary), [PolicyTerm(PolicyConfig(), 64)], torch.device("cpu"))
        with torch.no_grad():
            scored = policy(row).logprobs_R
        recorded = row.terms["policy"].arrays["sampler_logprobs"]
        assert len(scored) == len(recorded) > 0
        torch.testing.assert_close(scored, recorded, rtol=1e-5, atol=0.0)


MARK = "31415.9"
ASK = """
import json, os, socket, subprocess, sys, urllib.request
def ask(url=os.environ["OPENAI_BASE_URL"]):
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "Go."}], "tools": [tool]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request).read()
"""
IN_PYTHON = (
    "require('child_process').execFileSync('python', ['/work/program.py'], { stdio: 'inherit' }); process.exit(0)"
)
WAYS: dict[str, tuple[str, str, str]] = {
    "asks nobody": ("print('Hello.')", "harness", "Hello.*It never asked the policy"),
    "asks for ever": ("while True:\n  try: ask()\n  except OSError: pass", "", "max_turns"),
    "waits for a key": ("ask(); input()", "", "exit_1"),
    "asks another": ("ask('http://127.0.0.1:9/v1')", "harness", "It never asked the policy"),
    "leaves a process": (f"ask(); subprocess.Popen(['sleep', '{MARK}'])", "", "agent_completed"),
    "goes out": ("ask()\nfor host in ('1.1.1.1', '2606:4700::1111', 'example.com'):\n"
                 "  try: socket.create_connection((host, 80), 5)\n  except OSError: continue\n  sys.exit(9)",
                 "", "agent_completed"),
}  # fmt: skip
"""What a program does, and its end: the failure's kind and words, or no failure and the stop reason."""


# A program may do anything: its end has a name, its processes end with it, and no address but the policy's answers.
@pytest.mark.parametrize("installed", ["qwen_code"], indirect=True)
def test_the_end_of_a_program_that_does_otherwise_has_a_name(tmp_path: Path, model: Path, installed: str) -> None:
    files = {"program.js": IN_PYTHON}
    tasks = [make_task(id=name, start={**files, "program.py": ASK + text}) for name, (text, _, _) in WAYS.items()]
    settings = {"env": {"NODE_OPTIONS": "--require=/work/program.js"}, "max_turns": 3}
    played, _ = asyncio.run(play_scripted(installed, tmp_path, model, [], *tasks, **settings))
    ends = {reply.task_id.removeprefix("code/"): (reply.failure, reply.stop_reason) for reply, _ in played}
    for name, (_, kind, end) in WAYS.items():
        failure, reason = ends[name]
        assert (failure.kind if failure else "") == kind, ends
        assert re.search(end, failure.message if failure else str(reason), re.DOTALL), (name, ends)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if MARK.encode() in path.read_bytes()]
    assert not left


# Rollouts of one program begin alike, in a group and across tasks: a node that has played one computes a small share of
# the next one's first prompt, by the local engine's own rule. Claude Code puts its list of skills behind the task.
@pytest.mark.parametrize("installed", ["claude_code", "codex", "opencode", "qwen_code"], indirect=True)
def test_a_second_rollout_computes_little_of_its_first_prompt(tmp_path: Path, model: Path, installed: str) -> None:
    tasks = [make_task(id=name, prompt=f"Implement total, as {name}.") for name in ("one", "two")]
    _, turns = asyncio.run(play_scripted(installed, tmp_path, model, [], *tasks))
    prompts = [np.array(prompt, np.int32) for prompt, _, works in turns if works]
    first, second = prompts[:: len(prompts) // len(tasks)]
    computed = {}
    for case, prompt in {"group": first, "task": second}.items():
        cache = KvCache(slots=2, columns=CONTEXT)
        cache.place(first, "one")
        cache.computed[0], cache.running[0] = len(first), False
        _, cached = cache.place(prompt, case) or (0, 0)
        computed[case] = 1 - cached / len(prompt)
    assert computed["group"] < 0.001 and computed["task"] < (0.2 if installed == "claude_code" else 0.1), computed


# A task that needs three contexts is solved: Claude Code compacts whenever the one that it is told fills. Segments are
# samples. Each sampled token is trained once, those of the summaries too, with the advantage of the whole rollout.
@pytest.mark.parametrize("installed", ["claude_code"], indirect=True)
def test_a_task_of_three_contexts_is_solved_and_trained(tmp_path: Path, model: Path, installed: str) -> None:
    context, size = 32_768, 1000
    looks = [f"seq -s ' ' {first} {first + size}" for first in range(1000, 1028)]
    script = [call("Bash", command=word) for word in (*looks, EDIT)]
    settings = {"args": ["--tools", "Bash", "--system-prompt", "Repair it."], "env": {"CLAUDE_CODE_SIMPLE": "1"}}
    played, turns = asyncio.run(play_scripted(installed, tmp_path, model, script, context=context, **settings))
    reply = played[0][0]
    assert reply.failure is None and reply.reward == 1.0, reply
    assert max(len(prompt) + len(ids) for prompt, ids, _ in turns) <= context
    assert sum(turn.num_tokens or 0 for turn in reply.turns if turn.role == "tool") > 3 * context
    ended = [
        (finished_rollout(each, (), sibling=sibling, seed=0, samples=tokens), tokens)
        for sibling, (each, tokens) in enumerate([*played, (msgspec.structs.replace(reply, reward=0.0), [])])
    ]
    config = configuration(installed, model, tmp_path / "tasks", context, settings)
    plan = GroupPlan(group=0, source="code", task_index=0, seed=0, size=2)
    group = score_group(plan, ended, config.orchestrator, config.channels)
    masks = [flags(sample.loss_mask).astype(bool) for sample in group.samples]
    trained = [ints(each.input_ids)[mask].tolist() for each, mask in zip(group.samples, masks, strict=True)]
    assert len(group.samples) > 6
    assert all((floats(each.advantages) == 0.5 * mask).all() for each, mask in zip(group.samples, masks, strict=True))
    assert Counter(itertools.chain(*trained)) == Counter(itertools.chain(*(ids for _, ids, _ in turns)))
