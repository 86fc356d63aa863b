"""The launcher starts auditors where the configuration asks for them."""

import time
from typing import Any

import pytest
from stand import CONFIG

from composer_prime.config.load import resolve
from composer_prime.errors import RoleFailedError
from composer_prime.run.run_dir import RunDir
from trainer.launcher.supervise import RoleProcess, Supervisor, role_commands


@pytest.mark.parametrize(("words", "names"), [([], []), (["--orchestrator.audit.enabled"], ["auditor-0"])])
def test_the_launcher_starts_auditors_off_the_gpus(tmp_path, words, names):
    # Only where answers are audited. The GPUs are dealt to nodes and ranks.
    config = resolve(["@", str(CONFIG), *words])
    roles = {role.name: role for role in role_commands(config, RunDir(tmp_path / "run"), gpus=0)}
    assert [name for name in roles if name.startswith("auditor")] == names
    for name in names:
        assert roles[name].argv[-4:] == ["--run-dir", str(tmp_path / "run"), "--node-name", name]
        assert roles[name].env["CUDA_VISIBLE_DEVICES"] == "" and roles[name].kind == "auditor"


class Role:
    """A role's process that runs, or has ended with status 1."""

    def __init__(self, has_failed: bool) -> None:
        self.has_failed = has_failed

    def poll(self) -> int | None:
        return 1 if self.has_failed else None


# Without a node a run cannot go on, though its auditor lives; without an auditor it goes on.
@pytest.mark.parametrize("failed", ["node-0", "auditor-0"])
def test_an_auditor_is_no_node_that_is_left(tmp_path, failed):
    words = ["--orchestrator.audit.enabled", "--inference.max_restarts", "0"]
    config = resolve(["@", str(CONFIG), *words])
    run_dir, events = RunDir(tmp_path / "run"), []
    run_dir.log(failed).parent.mkdir(parents=True)
    run_dir.log(failed).write_text("the last words")
    nothing_to_guard: Any = None
    roles = role_commands(config, run_dir, gpus=0)
    run = Supervisor(run_dir=run_dir, roles=roles, guard=nothing_to_guard, config=config, on_event=events.append)
    for role in roles:
        process: Any = Role(role.name == failed)
        run.children.append(RoleProcess(role=role, process=process, log_offset=0, started=time.monotonic()))
    if failed == "node-0":
        with pytest.raises(RoleFailedError, match=r"(?s)no other node is left.*the last words"):
            run.poll()
    else:
        assert run.poll() == "running"
        assert "auditor-0" in events[0] and "gave up" in events[0]
