"""Keys of earlier releases: an error in a TOML file or a flag, a warning in the config.json of an old run."""

import json
import logging
from pathlib import Path

import pytest

from composer_prime.config.load import dump, read_config, resolve
from composer_prime.config.removed import REMOVED, without_removed
from composer_prime.errors import ConfigError

NOW = "now four are drawn"


@pytest.fixture(autouse=True)
def removed(monkeypatch):
    monkeypatch.setitem(REMOVED, "orchestrator.old_draws", NOW)
    monkeypatch.setitem(REMOVED, "orchestrator.source.old_table", NOW)


# A TOML file and a flag with a removed key are refused, by the key and what holds now.
def test_file_and_flag(tmp_path: Path):
    file = tmp_path / "old.toml"
    file.write_text(f'base = "{Path("configs/a1.toml").resolve()}"\n[orchestrator]\nold_draws = 4\n')
    with pytest.raises(ConfigError) as refused:
        resolve(["@", str(file)])
    assert all(part in str(refused.value) for part in ("orchestrator.old_draws", str(file), NOW))
    with pytest.raises(ConfigError) as refused:
        resolve(["@", "configs/a1.toml", "--orchestrator.old-draws", "4"])
    assert "--orchestrator.old_draws" in str(refused.value) and NOW in str(refused.value)


# An old run's config.json is read without its removed keys, also as a layer of a command line, and a warning names
# those that were in use.
def test_config_json(tmp_path: Path, caplog):
    config = resolve(["@", "configs/a1.toml"])
    values = json.loads(dump(config))
    values["orchestrator"]["old_draws"] = 4
    values["orchestrator"]["source"][0]["old_table"] = {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        assert dump(read_config(path)) == dump(config)
    assert "orchestrator.old_draws" in caplog.text and "old_table" not in caplog.text
    assert dump(resolve(["@", str(path)])) == dump(config)


# Settings of a shipped task set are refused in a new file and left out of an old run's.
# Another task set's, of the same names, stay.
@pytest.mark.parametrize(
    ("taskset", "setting", "value"),
    [
        ("orchestrator.coding.code", "conflicting", 3),
        ("orchestrator.coding.code", "runtime", {"allow": ["example.org"], "limits": {"file_mb": 1}}),
        ("orchestrator.coding.code", "tools", ["search"]),
        ("orchestrator.coding.code", "monitor", {"rules": {"grader-hunt": "note"}}),
        ("orchestrator.coding.formats.harbor", "output_chars", 900),
        ("orchestrator.coding.formats.programs", "shown_tests", 3),
    ],
)
def test_settings_of_task_sets(taskset: str, setting: str, value):
    def source(name: str) -> dict:
        tables = {"taskset": {"id": name, "seed": 1}, "eval_taskset": {setting: value}}
        return {"orchestrator": {"source": [{"name": "a", **tables}]}}

    def flags(name: str) -> list[str]:
        tables = source(name)["orchestrator"]["source"][0]
        return [
            w for key in tables if key != "name" for w in (f"--orchestrator.source.0.{key}", json.dumps(tables[key]))
        ]

    with pytest.raises(ConfigError, match=f"{setting}.* was removed: "):
        resolve(["@", "configs/a1.toml", *flags(taskset)])
    evaluation = without_removed(source(taskset), "old")["orchestrator"]["source"][0]["eval_taskset"]
    assert evaluation in ({}, {setting: {}}, {setting: []}, {setting: {"limits": {}}}, {setting: {"rules": {}}})
    assert resolve(["@", "configs/a1.toml", *flags("theirs")]).orchestrator.source[0].eval_taskset[setting]
    assert without_removed(source("theirs"), "old") == source("theirs")


# What is still a setting of another shipped task set stays.
def test_present_settings_stay():
    source = {"name": "a", "taskset": {"id": "orchestrator.coding.code", "output_chars": 900}}
    assert without_removed({"orchestrator": {"source": [source]}}, "old") == {"orchestrator": {"source": [source]}}


# A warning names what holds now, of what was on.
def test_a_warning_names_what_holds_now(caplog):
    values = {"orchestrator": {"min_group": 0}, "inference": {"local": {"prefix_cache": True}}}
    assert without_removed(values, "old") == {"orchestrator": {}, "inference": {"local": {}}}
    assert REMOVED["inference.local.prefix_cache"] in caplog.text and "min_group" not in caplog.text
