"""The launcher starts `orchestrator weights` where the configuration has nodes elsewhere pull."""

from __future__ import annotations

import pytest
from stand import config_file

from composer_prime.config.load import resolve
from composer_prime.run.run_dir import RunDir
from trainer.launcher.supervise import role_commands

SETTINGS = [
    ({}, None),
    ({"address": "0.0.0.0:5700"}, ["--listen", "0.0.0.0:5700"]),
    ({"address": "0.0.0.0:5700", "push": "s3://b/r"}, ["--listen", "0.0.0.0:5700", "--push", "s3://b/r"]),
]


@pytest.mark.parametrize(("settings", "options"), SETTINGS)
def test_the_launcher_starts_what_gives_out_weights(tmp_path, settings, options):
    words = [word for name, value in settings.items() for word in (f"--orchestrator.weights.{name}", value)]
    config = resolve(["@", str(config_file(tmp_path)), *words]).config
    roles = {role.name: role for role in role_commands(config, RunDir(tmp_path / "run"), gpus=0)}
    assert ("weights" in roles) == (options is not None)
    if options is not None:
        assert roles["weights"].argv[-len(options) - 2 :] == ["weights", str(tmp_path / "run"), *options]


@pytest.mark.parametrize(("words", "names"), [([], []), (["--orchestrator.audit.enabled"], ["auditor-0"])])
def test_the_launcher_starts_auditors_off_the_gpus(tmp_path, words, names):
    # Only where answers are audited. The GPUs are dealt to nodes and ranks.
    config = resolve(["@", str(config_file(tmp_path)), *words]).config
    roles = {role.name: role for role in role_commands(config, RunDir(tmp_path / "run"), gpus=0)}
    assert [name for name in roles if name.startswith("auditor")] == names
    for name in names:
        assert roles[name].argv[-4:] == ["--run-dir", str(tmp_path / "run"), "--node-name", name]
        assert roles[name].env["CUDA_VISIBLE_DEVICES"] == "" and roles[name].kind == "node"
