"""Keys of earlier releases: an error in a TOML file or a flag, a warning in the config.json of an old run."""

import json
import logging
from pathlib import Path

import pytest

from composer_prime.config.load import dump, read_config, resolve
from composer_prime.config.removed import REMOVED
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
    config = resolve(["@", "configs/a1.toml"]).config
    values = json.loads(dump(config))
    values["orchestrator"]["old_draws"] = 4
    values["orchestrator"]["source"][0]["old_table"] = {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        assert dump(read_config(path)) == dump(config)
    assert "orchestrator.old_draws" in caplog.text and "old_table" not in caplog.text
    assert dump(resolve(["@", str(path)]).config) == dump(config)


# A key that no release had is an error in both.
def test_unknown_key(tmp_path: Path):
    values = json.loads(dump(resolve(["@", "configs/a1.toml"]).config)) | {"unknown": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError):
        read_config(tmp_path / "config.json")
