"""kill -9 of any process in mid-run: nothing is left behind, and every sample of the run is trained exactly once."""

from __future__ import annotations

import json
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


def test_one_run_survives_the_loss_of_every_process(run):
    """In turn: a node, the trainer after a checkpoint, the orchestrator between two of them, the launcher.

    A node is replaced and its requests are reissued, so the run goes on. A killed trainer or orchestrator ends the
    run: the launcher stops the others, exits non-zero and names the role. A killed launcher takes its roles along.
    After each of these --resume trains the remaining steps, with hints and pairs as they were.
    """
    run.steps, run.config = 9, "configs/a4.toml"
    run.start().wait_for_step(1)
    os.kill(run.pid_of("node"), signal.SIGKILL)
    step = 4  # It needs rollouts of the new node. Every second step has a checkpoint.
    for role in ("trainer", "orchestrator"):
        run.wait_for_step(step)
        os.kill(run.pid_of(role), signal.SIGKILL)
        assert run.wait() != 0
        run.wait_until_gone()
        assert role in run.output()
        step = 1 + max(line["step"] for line in run.trainer_lines())
        run.start("--resume")
    run.wait_for_step(step)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.wait_until_gone()
    assert run.start("--resume").wait() == 0, run.output()[-3000:]
    run.wait_until_gone()
    assert_trained_exactly_once(run)
    assert (run.run_dir.final / "model.safetensors").exists()
    for line in run.trainer_lines():
        assert line["sdpo/turns"] > 0 and 0 < line["sdpo/jsd"] < 0.7
        assert line["dpo/pairs"] == line["pairs/served"] == 8
        assert line["hints/hinted"] >= line["sdpo/turns"] and 0 < line["rollout/turn_error_rate"] < 1
    rollouts = [json.loads(text) for text in run.run_dir.rollouts(run.steps).read_text().splitlines()]
    hinted = [turn for rollout in rollouts for turn in rollout["turns"] if turn["hint"]]
    assert hinted and all(turn["role"] == "assistant" and turn["error"] for turn in hinted)
    assert all(turn["hint"].startswith("Reminder: ") for turn in hinted)


def test_ctrl_c_stops_everything_and_resume_goes_on_with_two_ranks(run):
    """Ctrl-C before any checkpoint is due leaves no process and one of all that was trained; two ranks continue it."""
    run.settings += ["--trainer.checkpoint.every_steps", "0"]
    run.start().wait_for_step(3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(100) == 130
    run.wait_until_gone()
    (saved,) = run.run_dir.complete_checkpoints()
    assert saved == max(line["step"] for line in run.trainer_lines())
    assert f"continue after step {saved}\n" in run.output()
    run.settings += ["--trainer.ranks", "2"]
    assert run.start("--resume").wait() == 0, run.output()[-3000:]
    assert_trained_exactly_once(run)
