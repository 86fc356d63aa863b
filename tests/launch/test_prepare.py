"""The run directory before a start: what is refused, what is kept, what goes on."""

import stat
from pathlib import Path

import pytest

from composer_prime.config import Config
from composer_prime.config.load import dump, read_config
from composer_prime.errors import ConfigError
from composer_prime.plan.check_run_dir import folder_state
from composer_prime.run.run_dir import RunDir
from tests.configs_made import config_of
from trainer.launcher.launch import prepare


def config(folder: Path, **run) -> Config:
    return config_of(run={"output_dir": str(folder), **run})


def start(settings: Config):
    prepared = prepare(settings)
    prepared.lock.close()
    return prepared


def checkpoint(run_dir: RunDir, step: int, complete: bool = True) -> None:
    folder = run_dir.checkpoint(step)
    folder.mkdir(parents=True)
    if complete:
        (folder / "COMPLETE").touch()


def test_new_run_directory_holds_config_id_and_private_keys(tmp_path):
    # A fresh directory gets config.json, run_id and keys that only the owner reads.
    run_dir = start(config(tmp_path)).run_dir
    assert read_config(run_dir.config).run.name == "one"
    assert (run_dir.root / "run_id").read_text().startswith("one-")
    for key in run_dir.keys.glob("*.curve"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_existing_run_is_refused_with_both_ways_out(tmp_path):
    # Without --resume or run.overwrite the message names both, and the folder.
    start(config(tmp_path))
    with pytest.raises(ConfigError, match=r"--resume.*run\.overwrite") as caught:
        prepare(config(tmp_path))
    assert str(tmp_path / "one") in str(caught.value)


def test_foreign_folder_is_never_emptied(tmp_path):
    # A folder that is not a run directory keeps its files, also with run.overwrite.
    mine = tmp_path / "one" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("years of work")
    with pytest.raises(ConfigError, match="not a run directory"):
        prepare(config(tmp_path, overwrite=True))
    assert mine.read_text() == "years of work"


def test_overwrite_empties_a_run_directory(tmp_path):
    # run.overwrite makes a new run: new id, old metrics gone.
    first = start(config(tmp_path))
    identity = (first.run_dir.root / "run_id").read_text()
    first.run_dir.metrics.write_text("{}\n")
    again = start(config(tmp_path, overwrite=True))
    assert not again.run_dir.metrics.exists()
    assert (again.run_dir.root / "run_id").read_text() != identity


def test_resume_takes_the_newest_complete_checkpoint(tmp_path):
    # A newer folder without COMPLETE is ignored; id and keys stay; a stale endpoints.json goes.
    first = start(config(tmp_path))
    keys = (first.run_dir.keys / "server.curve").read_bytes()
    checkpoint(first.run_dir, 2)
    checkpoint(first.run_dir, 4, complete=False)
    first.run_dir.endpoints.write_text("{}")
    again = start(config(tmp_path, resume=True, max_steps=9))
    assert again.start_step == 2 and again.config.run.resume
    assert (again.run_dir.keys / "server.curve").read_bytes() == keys
    assert not again.run_dir.endpoints.exists()
    assert "changed run.max_steps: was 4, now 9" in again.notes


def at_the_divisor(folder: Path, tokens: int = 64, **policy: int) -> Config:
    """Return a resume whose settings, without `policy`, give a length divisor of 512 at most."""
    settings = config(folder, resume=True)
    settings.orchestrator.sampling.max_tokens = tokens
    settings.orchestrator.source[0].harness = {"id": "x", "max_turns": 1}
    return Config.model_validate({**settings.model_dump(), "channels": {"policy": policy}})


def test_a_resume_keeps_the_length_divisor(tmp_path):
    # config.json records the one that a start resolves; other settings do not move it, and a note names both values.
    first = at_the_divisor(tmp_path)
    first.run.resume = False
    run_dir = start(first).run_dir
    assert read_config(run_dir.config).channels.policy.max_completion_length == 64
    checkpoint(run_dir, 2)
    again = start(at_the_divisor(tmp_path, tokens=96))
    assert again.config.completion_length == read_config(run_dir.config).completion_length == 64
    assert any("max_completion_length stays 64" in note and "would give 96" in note for note in again.notes)
    assert not any("max_completion_length" in note for note in start(at_the_divisor(tmp_path)).notes)
    chosen = start(at_the_divisor(tmp_path, max_completion_length=32))
    assert chosen.config.completion_length == 32
    assert "changed channels.policy.max_completion_length: was 64, now 32" in chosen.notes


def test_a_resume_of_a_run_that_recorded_no_length_divisor_takes_the_former_default(tmp_path):
    # model.max_context, which was the divisor of every run whose config.json has none.
    first = at_the_divisor(tmp_path)
    first.run.resume = False
    run_dir = start(first).run_dir
    checkpoint(run_dir, 2)
    run_dir.config.write_text(dump(first))
    assert read_config(run_dir.config).channels.policy.max_completion_length is None
    again = start(at_the_divisor(tmp_path))
    assert again.config.completion_length == read_config(run_dir.config).completion_length == 512
    assert any("max_completion_length stays 512" in note and "would give 64" in note for note in again.notes)


PAID = ("pairs.jsonl", "pairs.votes.jsonl", "costs.jsonl", "hints/llm.jsonl", "reference/logprobs.jsonl")


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name} was paid for")


def test_resume_before_the_first_checkpoint_starts_over(tmp_path):
    # Nothing saved yet: journal and metrics of the crashed start go, keys stay, roles are told to start fresh. Pairs,
    # votes, hints and the sums that budgets count from survive, byte by byte.
    run_dir = start(config(tmp_path)).run_dir
    run_dir.journal.mkdir()
    put(run_dir.root, *PAID, "metrics.jsonl")
    again = start(config(tmp_path, resume=True))
    assert again.start_step == 0 and not read_config(again.run_dir.config).run.resume
    assert not run_dir.journal.exists() and not run_dir.metrics.exists()
    assert (run_dir.keys / "server.curve").exists()
    assert all((run_dir.root / name).read_text() == f"{name} was paid for" for name in PAID)


def test_a_run_starts_beside_pairs_that_were_replayed_before(tmp_path):
    # A folder that holds nothing but a replay's output is a fresh run directory: no --resume, nothing deleted, not even
    # with run.overwrite, which deletes runs. With a foreign file beside it, it is refused as any other folder.
    put(tmp_path / "one", *PAID)
    (tmp_path / "one" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not a run directory"):
        prepare(config(tmp_path))
    (tmp_path / "one" / "thesis.tex").unlink()
    assert folder_state(RunDir(tmp_path / "one")) == "new"
    start(config(tmp_path, overwrite=True))
    assert all((tmp_path / "one" / name).read_text() == f"{name} was paid for" for name in PAID)


def test_resume_under_other_sources_is_refused_naming_both(tmp_path):
    # What would make saved state meaningless is refused with the old and the new value.
    start(config(tmp_path))
    other = config(tmp_path, resume=True, seed=5)
    other.orchestrator.source[0].taskset["id"] = "y"
    with pytest.raises(ConfigError) as caught:
        prepare(other)
    text = str(caught.value)
    assert "run.seed: was 0, now 5" in text and "orchestrator.source.0.taskset.id: was 'x', now 'y'" in text


def test_resume_without_a_run_is_refused(tmp_path):
    # --resume of nothing does not start a new run by accident.
    with pytest.raises(ConfigError, match="there is no run in"):
        prepare(config(tmp_path, resume=True))


def test_remote_orchestrator_needs_its_keys(tmp_path):
    # With orchestrator.address fresh keys would be refused there, so they must be copied.
    settings = config(tmp_path)
    settings.orchestrator.address = "tcp://10.0.0.1:5555"
    with pytest.raises(ConfigError, match=r"lacks trainer\.token, signing\.ed25519: copy run_id, keys/trainer\.token"):
        prepare(settings)
