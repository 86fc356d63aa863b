"""kill -9 of any process in mid-run: nothing is left behind, and every sample of the run is trained exactly once."""

from __future__ import annotations

import os
import signal

import pytest
from quick_run import QuickRun

from composer_prime.run import ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def run(tmp_path, request):
    run = QuickRun(tmp_path, f"e2e-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}")
    yield run
    run.stop()


def assert_trained_exactly_once(run: QuickRun) -> None:
    problems = ledger.check_ledger(run.run_dir.ledger)
    assert not problems, problems
    assert sorted(ledger.effective(run.run_dir.ledger)) == list(range(1, run.steps + 1))


@pytest.mark.parametrize(("who", "step"), [("orchestrator", 3), ("trainer", 3), ("trainer", 4)])
def test_a_killed_role_ends_the_run_and_resume_completes_it(run, who, step):
    """The launcher stops the others, exits non-zero and names the role; --resume trains each remaining step once."""
    run.start().wait_for_step(step)
    os.kill(run.pid_of(who), signal.SIGKILL)
    assert run.wait() != 0
    run.wait_until_gone()
    assert who in run.output()
    assert run.start("--resume").wait() == 0, run.output()[-3000:]
    run.wait_until_gone()
    assert_trained_exactly_once(run)
    assert (run.run_dir.final / "model.safetensors").exists()


def test_a_killed_node_is_replaced_and_the_run_goes_on(run):
    """Its requests are reissued to the node that the launcher starts in its place; no restart of the run is needed."""
    run.start().wait_for_step(2)
    os.kill(run.pid_of("node"), signal.SIGKILL)
    assert run.wait() == 0, run.output()[-3000:]
    run.wait_until_gone()
    assert_trained_exactly_once(run)


def test_a_killed_launcher_takes_its_roles_along(run):
    """No process survives a kill -9 of the launcher, and the run can be resumed."""
    run.start().wait_for_step(3)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.wait_until_gone()
    assert run.start("--resume").wait() == 0, run.output()[-3000:]
    assert_trained_exactly_once(run)


def test_ctrl_c_stops_everything_and_resume_goes_on_with_two_ranks(run):
    """Ctrl-C before any checkpoint is due leaves no process and one of all that was trained; two ranks continue it."""
    run.settings += ["--trainer.checkpoint.every_steps", "0"]
    run.start().wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(100) == 130
    run.wait_until_gone()
    (saved,) = run.run_dir.complete_checkpoints()
    assert saved == max(line["step"] for line in run.trainer_lines()) and f"go on after step {saved}\n" in run.output()
    run.settings += ["--trainer.ranks", "2"]
    assert run.start("--resume").wait() == 0, run.output()[-3000:]
    assert_trained_exactly_once(run)
