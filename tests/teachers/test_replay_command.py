"""`composer replay` as a user meets it: wrong input, an interruption, teachers that do not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from loopback import Endpoint, overrule, run_config, serving, state

from composer_prime.config import Config
from composer_prime.errors import ConfigError
from composer_prime.plan.preflight import check_start
from composer_prime.run.costs import read_costs
from composer_prime.traces.records import read_pairs, write_state
from composer_prime.traces.replay.replay import (
    INTERRUPTION,
    main,
    parse_arguments,
    replay,
    replay_summary,
    training_limits,
)

POOL = Path(__file__).with_name("pool.toml").read_text()


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """What `composer replay` says to a wrong input."""
    with pytest.raises(SystemExit) as left:
        main([*map(str, words)])
    assert left.value.code == 2
    return capsys.readouterr().err


# A file of teachers alone is enough: no step limits the states. A run's file does, and so do flags.
def test_a_file_of_teachers_alone(tmp_path: Path) -> None:
    whole, alone = tmp_path / "run.toml", tmp_path / "pool.toml"
    whole.write_text(POOL)
    alone.write_text(POOL[POOL.index("[[teachers.teacher]]") :])
    words = ["s.zst", "-o", "p.jsonl"]
    config = parse_arguments([*words, "@", str(alone), "--states", "9", "--per-trace", "2"])[2]
    assert (config.teachers.select.states, config.teachers.select.per_trace) == (9, 2)
    assert training_limits(config) is None and len(config.teachers.teacher) == 2
    flags = ["--model.path", "./qwen", "--model.max_context=4096", "--states=3"]
    config = parse_arguments([*words, "@", str(alone), *flags])[2]
    assert (config.model.path, config.model.max_context) == ("./qwen", 4096)
    assert config.teachers.select.states == 3
    config = parse_arguments([*words, "@", str(whole)])[2]
    assert config.model.max_context == 384 and config.teachers.select.states is None


# Wrong input is refused before anything is loaded or written, with what to do about it.
def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states, pairs, toml, empty = (tmp_path / name for name in ("s.jsonl", "p.jsonl", "x.toml", "e.jsonl"))
    states.write_bytes(write_state(state(0)))
    toml.write_text(POOL)
    empty.write_bytes(b"")
    told = {
        (tmp_path / "none.jsonl", pairs): "cannot be read",
        (tmp_path, pairs): "cannot be read",
        (empty, pairs): "holds no states",
        (toml, pairs): "x.toml:1 is not a state",
        (states, states): "name another file for the pairs",
        (states, tmp_path / "x" / ".." / "s.jsonl"): "name another file for the pairs",
        (states, pairs): "set the environment variable NO_SUCH_KEY",
    }
    for (given, out), message in told.items():
        assert message in refused(capsys, given, "-o", out, "@", toml)
    assert "give states, -o pairs and a configuration" in refused(capsys, states, "@", toml)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.jsonl", "s.jsonl", "x.toml"]
    known = toml.with_name("known.toml")
    known.write_text(POOL.replace("NO_SUCH_KEY", "LOOPBACK_KEY"))
    assert "name another file" in refused(capsys, states, "-o", tmp_path, "@", known)


# The first Ctrl-C: the call in flight ends and its answer is kept, no other is made; the next replay pays for the rest.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interruption_pays_nothing_twice(tmp_path: Path, number: int) -> None:
    states, pairs = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    states.write_bytes(b"".join(write_state(state(number)) for number in range(3)))
    endpoint = Endpoint(answers=overrule)

    def interrupting(model: str, messages: list[dict]) -> tuple[str, dict]:
        endpoint.answers = overrule
        os.kill(os.getpid(), number)
        return overrule(model, messages)

    endpoint.answers = interrupting
    async with serving(endpoint):
        config = run_config(tmp_path, endpoint.url, concurrent_states=1)
        first = await replay(states, pairs, config)
        assert first.stopped == INTERRUPTION and len(endpoint.asked) == 1 and first.usd > 0
        second = await replay(states, pairs, config)
        assert second.stopped is None and second.pairs == 3
    assert len(endpoint.asked) == len(set(endpoint.answered)) == 6
    settled = [line for line in read_costs(tmp_path / "p.costs.jsonl") if line["kind"] == "settled"]
    assert len(settled) == 6 and {line["status"] for line in settled} == {"ok"}
    assert len(list(read_pairs(pairs))) == 3


# Teachers that give no vote: the summary says why, and the command does not call that a success. Nor does it where the
# other states are refused.
async def test_why_there_was_no_vote(tmp_path: Path) -> None:
    states, pairs = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    states.write_bytes(write_state(state(0, family="unknown")) + write_state(state(1)))
    script = {model: ["401"] for model in ("gpt-a", "qwen-b", "glm-c")}
    async with serving(Endpoint(answers=overrule, script=script)) as endpoint:
        progress = await replay(states, pairs, run_config(tmp_path, endpoint.url))
    assert progress.outcomes == {"refused": 1, "failed": 1}
    assert "no state was decided" in (progress.stopped or "")
    shown = "\n".join(replay_summary(progress, pairs))
    assert "gpt-a (gpt-a at http://127.0.0.1" in shown and "status 401" in shown and "stopped" in shown


# A run that asks teachers while it trains is refused before it starts when a key is not there.
def test_a_missing_key_is_found_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(config: Config) -> str:
        return "\n".join(check_start(config, gpus=0).problems)

    config = run_config(tmp_path, "http://127.0.0.1:9/v1", online=True)
    assert "LOOPBACK_KEY" not in problems(config)
    monkeypatch.delenv("LOOPBACK_KEY")
    assert "teacher 'gpt-a' needs a key" in problems(config)


# A state that no step of the run can hold is refused, and nobody is paid for it.
@pytest.mark.parametrize(("letters", "row_tokens"), [(400, 8192), (150, 384)])
async def test_states_beyond_a_training_step_are_not_paid_for(tmp_path: Path, letters: int, row_tokens: int) -> None:
    states, pairs = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    long = [{"role": "user", "content": "0 " * letters}]
    states.write_bytes(write_state(state(0)) + write_state(state(1, messages=long)))
    endpoint = Endpoint(answers=overrule)
    async with serving(endpoint):
        config = run_config(tmp_path, endpoint.url)
        trainer = config.trainer.model_copy(update={"micro_batch_tokens": row_tokens})
        config = config.model_copy(update={"trainer": trainer})
        progress = await replay(states, pairs, config)
    assert progress.outcomes == {"overruled": 1, "refused": 1}
    assert not any("0 0 0" in question for _, question in endpoint.answered)
    (reason,) = progress.refusals
    assert ("model.max_context = 384" if letters == 400 else "trainer.micro_batch_tokens = 384") in reason


# A replay that is finished can be repeated, although some of its states can never be judged.
async def test_repeating_a_finished_replay(tmp_path: Path) -> None:
    states, pairs = tmp_path / "s.jsonl", tmp_path / "p.jsonl"
    states.write_bytes(write_state(state(0)) + write_state(state(1, family="unknown")))
    only = tmp_path / "only.jsonl"
    only.write_bytes(write_state(state(1, family="unknown")))
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = run_config(tmp_path, endpoint.url)
        assert (await replay(states, pairs, config)).outcomes == {"overruled": 1, "refused": 1}
        again = await replay(states, pairs, config)
        assert (again.resumed, again.stopped, again.outcomes) == (1, None, {"refused": 1})
        with pytest.raises(ConfigError, match="all 1 states were refused"):
            await replay(only, tmp_path / "q.jsonl", config)
