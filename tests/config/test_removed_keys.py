"""Keys of earlier releases: an error in a TOML file or a flag, a warning in the config.json of an old run."""

import json
import logging
from pathlib import Path

import pytest

from composer_prime.config.load import dump, read_config, resolve
from composer_prime.config.removed import REMOVED, without_removed
from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig
from orchestrator.hints.generate import Templates
from orchestrator.hints.stage import check_kinds

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


# Settings of a shipped task set, also by its former name, are refused in a new file and left out of an old run's.
# Another task set's, of the same names, stay.
@pytest.mark.parametrize(
    ("taskset", "setting", "value"),
    [
        ("orchestrator.environments.code", "conflicting", 3),
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


# An older run's curriculum and own loss terms are read under the keys of now.
def test_renamed_keys(tmp_path: Path):
    values = json.loads(dump(resolve(["@", "configs/a1.toml"])))
    values["orchestrator"]["curriculum"] = {"import_path": "orchestrator.tasks.curriculum:Frontier", "kwargs": {}}
    values["channels"]["policy"] |= {"import_path": "mine:loss", "kwargs": {"share": 1}}
    values["channels"]["own"] = [{"import_path": "mine:Term", "weight": 2.0, "settings": {"a": 1}}]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path / "config.json")
    assert (config.orchestrator.curriculum, config.channels.policy.loss) == (
        PartConfig(name="frontier"),
        PartConfig(name="mine:loss"),
    )
    assert config.channels.own[0].model_dump() == {"name": "mine:Term", "settings": {"a": 1}, "weight": 2.0}


# Removed values are read as the nearest present ones, also in the long form. A new file is told which these are.
def test_removed_values(tmp_path: Path):
    values = json.loads(dump(resolve(["@", "configs/a1.toml", "--orchestrator.hints.weights", '{"judged": 2}'])))
    values["orchestrator"]["hints"] |= {"detect": [{"name": "judge", "settings": {}}, "tool_error"]}
    values["orchestrator"]["hints"] |= {"layers": [{"name": "introspection"}, "raw_error"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    hints = read_config(tmp_path / "config.json").orchestrator.hints
    assert hints is not None and (hints.detect, hints.layers) == (["tool_error"], ["raw_error"])
    check_kinds(hints, Templates.load())
    for flag, value, present in [
        ("orchestrator.hints.detect", '["judge"]', "tool_error"),
        ("orchestrator.hints.layers", '["introspection"]', "raw_error"),
        ("channels.sdpo.teacher.kind", "trust_region", "frozen"),
    ]:
        with pytest.raises(ConfigError, match=f"was removed, and '{present}' comes nearest"):
            resolve(["@", "configs/a1.toml", f"--{flag}", value])
