"""Names of modules that moved."""

import pytest

from composer_prime.config.orchestrator import SourceConfig
from composer_prime.config.removed import MOVED, present_name
from composer_prime.host import module_file


# A configuration that names a moved task set finds it, also below a package; each former name gives a warning.
@pytest.mark.parametrize("former", [*MOVED, "orchestrator.environments.formats.harbor"])
def test_former_names_of_task_sets_work(former, caplog):
    present_name.cache_clear()
    source = SourceConfig(name="code", taskset={"id": former, "split": "all"}, eval_taskset={"split": "eval"})
    assert source.taskset["id"].startswith(("orchestrator.coding.", "examples.")) and source.taskset["split"] == "all"
    assert module_file(source.taskset["id"]) is not None
    assert source.taskset["id"] in caplog.text
    assert ("run.import_from" in caplog.text) == source.taskset["id"].startswith("examples.")


# Other names stay.
def test_other_names_stay():
    assert present_name("orchestrator.environments.codes") == "orchestrator.environments.codes"
