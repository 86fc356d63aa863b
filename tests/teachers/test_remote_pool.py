"""A pool of remote teachers alone: the base is served beside it on this machine, chooses texts and opens the gate."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path

import pytest
from loopback import Endpoint, run_config, serving, state

from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.run_dir import RunDir
from composer_prime.traces.pairs import TINY_PAIRS, Pair, PairFile, read_gate
from composer_prime.traces.replay.online import OnlineReplay
from composer_prime.traces.replay.records import read_pairs
from composer_prime.traces.state import Message, TraceState, write_state
from orchestrator.preferences import ReleasedPairs

STATES, WINDOW = 44, 32
"""What is left after the window is too little for a verdict of its own."""


def toolsmith() -> list[Pair]:
    """Pairs that ship, one call each, one a state: what the tiny policy did, and what teachers would have done."""
    single = (pair for pair in read_pairs(TINY_PAIRS) if len(pair.chosen.get("tool_calls") or []) == 1)
    return list(islice({pair.state.state_id: pair for pair in single}.values(), STATES))


def recorded(pairs: list[Pair]) -> list[TraceState]:
    return [
        state(number, pair.trace, "tiny-policy", messages=pair.state.messages, tools=pair.state.tools,
              student_action=pair.rejected)
        for number, pair in enumerate(pairs)
    ]  # fmt: skip


def answering(pairs: list[Pair]) -> Endpoint:
    """Teachers that give the chosen call; the first of them names its arguments in the other order."""
    calls = {told(pair.state.messages): pair.chosen["tool_calls"][0]["function"] for pair in pairs}

    def answers(model: str, messages: list[Message]) -> tuple[str, dict]:
        function = calls[told(messages)]
        arguments = json.loads(function["arguments"])
        return function["name"], dict(reversed(arguments.items())) if model == "gpt-a" else arguments

    return Endpoint(answers=answers)


def told(messages: list[Message]) -> str:
    return json.dumps(messages, sort_keys=True)


# No teacher is local, so nothing but the base is served here: it chooses among texts that say the same, its margins are
# measured, the window passes, and replay-DPO may train it.
@pytest.mark.slow
def test_the_base_of_a_remote_pool(tmp_path: Path) -> None:
    pairs, run_dir = toolsmith(), RunDir(tmp_path / "x")
    states, path = tmp_path / "states.jsonl", run_dir.root / "pairs.jsonl"
    states.write_bytes(b"".join(map(write_state, recorded(pairs))))

    async def run() -> None:
        async with serving(answering(pairs)) as endpoint:
            gate = {"window_pairs": WINDOW, "min_pairs_a_trace": 1.0}
            roomy = {"usd_per_call": 10.0, "usd_per_trace": 100.0, "usd_per_run": 1000.0}
            teachers = {"online": True, "states": states, "score": True, "system_prompt": "", "gate": gate}
            config = run_config(tmp_path, endpoint.url, **teachers, budget=roomy)
            config.channels.replay_dpo.weight = 0.25
            assert config.teachers.models_served("tiny") == ["tiny"]
            await OnlineReplay(config, run_dir, MetricsFile(run_dir.metrics, "test"), lambda: 1).run()
            assert len(endpoint.asked) == 2 * STATES

    asyncio.run(run())
    made, measured, file = list(read_pairs(path)), read_gate(path), PairFile(path)
    assert {pair.teachers["chosen_by"] for pair in made if len(arguments(pair)) > 1} == {"likeliest"}
    assert measured is not None and [verdict.reasons for verdict in measured.verdicts] == [[]]
    assert file.refresh() == len(made) >= measured.measured >= WINDOW
    logged = json.loads(run_dir.metrics.read_text().splitlines()[-1])
    assert (logged["gate/beta"], logged["gate/pairs_passed"]) == (0.25, measured.passed)
    released = ReleasedPairs(file)
    assert released.refresh() and all(released.allows(index) for index in range(measured.measured))


def arguments(pair: Pair) -> dict:
    return json.loads(pair.chosen["tool_calls"][0]["function"]["arguments"])
