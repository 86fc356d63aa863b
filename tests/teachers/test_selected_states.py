"""Which states of a file are replayed."""

from pathlib import Path

import pytest
from loopback import Endpoint, overrule, run_config, serving, state

from composer_prime.config.teachers import SelectConfig
from composer_prime.traces.records import count_selected, selected_states, write_state
from composer_prime.traces.replay.replay import replay

LONG = [state(number, "a", error="no" if number in (5, 6) else None) for number in range(8)]
SHORT = [state(number, "b") for number in range(2)]


def states_file(tmp_path: Path) -> Path:
    path = tmp_path / "s.jsonl"
    path.write_bytes(b"".join(map(write_state, [*LONG, *SHORT])))
    return path


# Errors come first; every trace has its turn, and the file's order stays.
@pytest.mark.parametrize(
    ("select", "taken"),
    [
        ({}, ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "b0", "b1"]),
        ({"states": 2}, ["a5", "b0"]),
        ({"states": 5}, ["a0", "a5", "a6", "b0", "b1"]),
        ({"per_trace": 1}, ["a5", "b0"]),
        ({"per_trace": 4}, ["a0", "a1", "a5", "a6", "b0", "b1"]),
        ({"states": 3, "per_trace": 1}, ["a5", "b0"]),
        ({"states": 99}, ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "b0", "b1"]),
    ],
)
def test_which_states_are_taken(tmp_path: Path, select: dict, taken: list[str]) -> None:
    path, config = states_file(tmp_path), SelectConfig(**select)
    states = selected_states(path, config)
    assert count_selected(path, config) == len(taken)
    assert [f"{each.trace_id}{each.step}" for each in states] == taken


# A replay pays for the selected states alone. A wider one goes on from there.
async def test_a_replay_of_some_states(tmp_path: Path) -> None:
    path, pairs = states_file(tmp_path), tmp_path / "p.jsonl"
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = run_config(tmp_path, endpoint.url, select={"states": 2})
        assert (await replay(path, pairs, config)).states == 2
        wider = run_config(tmp_path, endpoint.url, select={"states": 5})
        progress = await replay(path, pairs, wider)
        assert (progress.resumed, progress.states) == (2, 3)
