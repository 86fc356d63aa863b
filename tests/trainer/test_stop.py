"""Stopping trainer ranks on purpose: what was trained is in a checkpoint, within a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rank_process import start_ranks
from small_runs import make_samples
from step_peer import StepPeer

from composer_prime.run.ledger import check_ledger, effective
from trainer import train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def stop_after(run, peer: StepPeer, step: int, number: int = signal.SIGTERM, count: int = 1) -> tuple[list[int], str]:
    """Signal ranks that have trained `step` and wait for the next batch; their exit codes and rank 0's output."""
    peer.quiet_from = step + 1
    ranks = run.start(count)
    ranks[0].wait_for(f"step {step}:")
    for rank in ranks:
        os.kill(rank.pid, number)
    return [rank.wait(200) for rank in ranks], ranks[0].output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_waiting_ranks_with_a_checkpoint_to_resume_from(make_run, number):
    # Two ranks, no checkpoint due: after the signal step 1 is saved, and a resume trains steps 2 and 3 only.
    run = make_run(trainer={"checkpoint": {"every_steps": 0}})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        codes, output = stop_after(run, peer, 1, number, count=2)
        assert codes == [128 + number] * 2 and "stopped after step 1: its checkpoint is written" in output, output
        assert run.dir.complete_checkpoints() == [1]
        peer.quiet_from = None
        resumed = run.config.run.model_copy(update={"resume": True})
        again = run.write(run.config.model_copy(update={"run": resumed}))
        assert again.train(2)[0] == [0, 0]
    assert check_ledger(run.dir.ledger) == [] and list(effective(run.dir.ledger)) == [1, 2, 3]


def test_a_signal_to_one_rank_alone_stops_all_with_a_checkpoint(make_run):
    # As on several machines of which one is shut down: while all wait for a batch, rank 0 hears of rank 1's signal.
    run = make_run(trainer={"checkpoint": {"every_steps": 0}})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 2
        ranks = run.start(2)
        ranks[0].wait_for("step 1:")
        os.kill(ranks[1].pid, signal.SIGTERM)
        codes = [rank.wait(50) for rank in ranks]
    assert codes == [143, 143] and run.dir.complete_checkpoints() == [1], ranks[0].output


def looks_for_the_orchestrator(run_dir: str) -> None:
    """A rank that says when it begins to look."""
    find = train.find_endpoint

    def look(*parts):
        (Path(run_dir) / f"looks-{os.environ['RANK']}").touch()
        return find(*parts)

    train.find_endpoint = look
    sys.exit(train.main(["--run-dir", run_dir]))


def test_a_signal_to_one_rank_alone_stops_all_that_look_for_the_orchestrator(make_run):
    # None is there yet: rank 0 hears of rank 1's signal.
    run = make_run()
    ranks = start_ranks([run.dir.root] * 2, work=looks_for_the_orchestrator)
    deadline = time.monotonic() + 200
    while len([*run.dir.root.glob("looks-*")]) < 2:
        assert time.monotonic() < deadline, ranks[0].output
        time.sleep(0.05)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == [143, 143], ranks[0].output


def slow_to_publish(run_dir: str) -> None:
    """A rank that takes longer to publish step 1 than one with nothing to save takes to leave."""
    publish = train.Trainer._publish

    def slow(trainer, client, step, *of_step):
        time.sleep(train.LEAVE_S + 1 if step == 1 else 0)
        return publish(trainer, client, step, *of_step)

    train.Trainer._publish = slow
    sys.exit(train.main(["--run-dir", run_dir]))


def test_a_signal_between_the_ledger_and_the_publication_saves_the_step(make_run):
    # A step counts from its line in the ledger on: a stop writes its checkpoint, however long its copy takes.
    run = make_run(trainer={"checkpoint": {"every_steps": 0}})
    with StepPeer(run.dir, make_samples, max_steps=3):
        (rank,) = start_ranks([run.dir.root], work=slow_to_publish)
        deadline = time.monotonic() + 200
        while not run.dir.ledger.exists():
            assert time.monotonic() < deadline, rank.output
            time.sleep(0.05)
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.wait(200) == 143
    assert list(effective(run.dir.ledger)) == [1] == run.dir.complete_checkpoints(), rank.output


def test_a_rank_with_several_threads_stops_with_a_checkpoint(make_run, tmp_path):
    # Libraries start their threads at import: whichever takes the signal, the rank writes its checkpoint.
    run = make_run(trainer={"threads": 2, "checkpoint": {"every_steps": 0}})
    command = [sys.executable, "-m", "trainer.train", "--run-dir", str(run.dir.root)]
    with StepPeer(run.dir, make_samples, max_steps=3) as peer, (tmp_path / "log").open("w") as log:
        peer.quiet_from = 2
        environment = os.environ | {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
        rank = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 200
        while not any(request.step == 2 for request in peer.requests):
            assert time.monotonic() < deadline and rank.poll() is None
            time.sleep(0.05)
        rank.send_signal(signal.SIGTERM)
        assert rank.wait(200) == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert run.dir.complete_checkpoints() == [1]


def test_a_saved_step_is_not_saved_again(make_run):
    # A stop right after a due checkpoint leaves at once.
    run = make_run(trainer={"checkpoint": {"every_steps": 1}})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        codes, _ = stop_after(run, peer, 1)
    assert codes == [143] and peer.checkpoints == [1] == run.dir.complete_checkpoints()


def test_before_the_first_step_there_is_nothing_to_save(make_run):
    # A rank that waits for batch 1 leaves without a checkpoint.
    run = make_run()
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 1
        (rank,) = run.start()
        deadline = time.monotonic() + 200
        while not peer.requests:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(rank.pid, signal.SIGTERM)
        assert rank.wait(200) == 143
    assert peer.checkpoints == [] == run.dir.complete_checkpoints()


@pytest.mark.parametrize("case", ["silent", "refused", "switched off"])
def test_a_checkpoint_that_cannot_be_written_does_not_hold_up_the_stop(make_run, case):
    # The orchestrator is silent or cannot save, or checkpoints are switched off: the rank leaves in time, and logs it.
    timeout_s = 0 if case == "switched off" else 3.5
    run = make_run(trainer={"checkpoint": {"every_steps": 0, "stop_timeout_s": timeout_s}})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_checkpoints = case == "silent"
        peer.refuse_checkpoint = "no space left on its disk" if case == "refused" else None
        codes, output = stop_after(run, peer, 1)
    said = {"silent": "no checkpoint within 4 s", "refused": "no space left on its disk", "switched off": "stopping"}
    assert codes == [143] and said[case] in output and "is written" not in output, output
    assert run.dir.complete_checkpoints() == []


def test_a_rank_alone_in_a_collective_ends_in_time(make_run):
    # Rank 1 is stopped (not dead), rank 0 waits for it in a collective: SIGTERM still ends rank 0 within its patience.
    run = make_run(trainer={"checkpoint": {"stop_timeout_s": 1}})
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 2
        ranks = run.start(2)
        ranks[0].wait_for("step 1:")
        os.kill(ranks[1].pid, signal.SIGSTOP)
        os.kill(ranks[0].pid, signal.SIGTERM)
        assert ranks[0].wait(200) == 128 + signal.SIGTERM
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[1].wait(200)


def test_a_rank_ends_with_its_killed_launcher(make_run):
    # `kill -9` of the process that started a rank: the rank leaves, although it still waits for batch 1.
    run = make_run()
    start = (
        "import subprocess, sys; from composer_prime.run.process import child_options;"
        "subprocess.run(sys.argv[1:], **child_options())"
    )
    rank_command = [sys.executable, "-m", "trainer.train", "--run-dir", str(run.dir.root)]
    with StepPeer(run.dir, make_samples, max_steps=3) as peer:
        peer.quiet_from = 1
        launcher = subprocess.Popen([sys.executable, "-c", start, *rank_command])
        deadline = time.monotonic() + 200
        while not peer.requests:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (rank,) = psutil.Process(launcher.pid).children()
        launcher.kill()
        launcher.wait()
        assert not psutil.wait_procs([rank], timeout=60)[1]
