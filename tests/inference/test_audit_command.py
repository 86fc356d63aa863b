"""The command lines that start an auditor."""

import re

import pytest

from composer_prime.config import load
from composer_prime.errors import ConfigError
from composer_prime.run.keys import RunKeys
from composer_prime.run.run_dir import RunDir, write_atomic
from inference.main import _as_auditor, _main
from tests.configs_made import config_of


@pytest.fixture
def run_dir(tmp_path):
    run = RunDir(tmp_path / "run")
    RunKeys.create(run.keys)
    config = config_of(
        inference={"engine": "vllm", "device": "cuda", "dtype": "bfloat16"}, orchestrator={"audit": {"enabled": True}}
    )
    write_atomic(run.config, load.dump(config).encode())
    return run


def test_an_auditor_runs_the_local_engine_whatever_the_nodes_run(run_dir, monkeypatch, capsys):
    # Only that engine says what it would draw, and the run's device is that of its nodes.
    monkeypatch.setattr("sys.argv", ["inference", "audit", "--run-dir", str(run_dir.root), "--dry-run"])
    assert _main() == 0
    assert "auditor   auditor: local engine on auto" in capsys.readouterr().out


def test_an_auditor_elsewhere(run_dir, monkeypatch, capsys):
    # It needs the address, the model and a copy of the token.
    words = ["audit", "tcp://127.0.0.1:5501", "--model", "tiny", "--token-file", str(run_dir.keys / "trainer.token")]
    monkeypatch.setattr("sys.argv", ["inference", *words, "--name", "checker", "--dry-run"])
    assert _main() == 0
    out = capsys.readouterr().out
    assert "auditor   checker: local engine" in out and "pulled over the link" in out


def test_a_mounted_token_is_a_link(run_dir, tmp_path):
    # As clusters mount their secrets: where it leads is what must be private.
    (link := tmp_path / "token").symlink_to(run_dir.keys / "trainer.token")
    words = ["tcp://127.0.0.1:5501", "--model", "tiny", "--token-file", str(link)]
    assert _as_auditor(words)[0].keys() == RunKeys(run_dir.keys).client("trainer")
    (run_dir.keys / "trainer.token").chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it"):
        _as_auditor(words)


def test_an_auditor_computes_in_float32(run_dir):
    # On any device, whatever the run's nodes compute in. One elsewhere may be told otherwise.
    joining = ["tcp://127.0.0.1:5501", "--model", "tiny", "--token-file", str(run_dir.keys / "trainer.token")]
    for words, dtype in (
        (["--run-dir", str(run_dir.root)], "float32"),
        ([*joining, "--device", "cuda"], "float32"),
        ([*joining, "--dtype", "bfloat16"], "bfloat16"),
    ):
        assert _as_auditor(words)[0].inference.dtype == dtype


def test_a_run_without_audits_has_no_work_for_an_auditor(run_dir):
    # Said at once: its gateway would admit none.
    text = run_dir.config.read_text()
    run_dir.config.write_text(re.sub(r'("audit":\s*{\s*"enabled":\s*)true', r"\1false", text))
    with pytest.raises(ConfigError, match=r"orchestrator\.audit\.enabled is false .*--orchestrator\.audit\.enabled"):
        _as_auditor(["--run-dir", str(run_dir.root)])
