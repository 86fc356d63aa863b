"""A disk that is really full: a small tmpfs, which needs the right to mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import make_samples
from step_peer import StepPeer

from composer_prime.run.ledger import effective
from composer_prime.run.weights import WeightStore

pytestmark = pytest.mark.process

SIZE = 4 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB, mounted where the test's run directories lie."""
    mount = shutil.which("mount")
    argv = [mount or "", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", tmp_path]
    done = mount and subprocess.run(argv, capture_output=True)
    if not done or done.returncode:
        pytest.skip("a tmpfs cannot be mounted here (needs Linux and CAP_SYS_ADMIN)")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(disk: Path, leave_bytes: int) -> Path:
    """Take all of the disk but `leave_bytes`."""
    ballast = disk / "ballast"
    room = shutil.disk_usage(disk).free - leave_bytes
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room)
    return ballast


def test_a_full_disk_at_a_checkpoint(small_disk, make_run):
    # The disk is full when checkpoint 1 is due: it is given up with the reason, training goes on; once there is room
    # again checkpoint 2 is whole, and no trace of checkpoint 1 is left.
    run = make_run(run={"max_steps": 3}, trainer={"checkpoint": {"every_steps": 1}, "weights": {"keep": 2}})
    taken: list[Path] = []

    def answer(peer, request):
        if request.step == 1 and not taken:
            taken.append(fill(small_disk, leave_bytes=160 << 10))  # room for the weights, not for the moments as well
        elif request.step == 2:  # the checkpoint is written beside this step
            while run.dir.checkpoint(1).exists():
                time.sleep(0.02)
            taken[0].unlink(missing_ok=True)

    with StepPeer(run.dir, make_samples, max_steps=3, answer=answer) as peer:
        codes, outputs = run.train()
    assert codes == [0], "\n".join(outputs)
    output = outputs[0]
    assert "no checkpoint of step 1" in output and "No space left on device" in output, output
    assert run.dir.complete_checkpoints() == [2, 3] and not run.dir.checkpoint(1).exists()
    assert [done.step for done in peer.done] == [0, 1, 2, 3] and list(effective(run.dir.ledger)) == [1, 2, 3]


def test_a_full_disk_at_publication_ends_the_run_and_resume_goes_on(small_disk, make_run):
    # Without room for step 2's weights the run ends and says what to do; with room again --resume trains steps 2 and 3.
    run = make_run(run={"max_steps": 3}, trainer={"checkpoint": {"every_steps": 1}})
    taken: list[Path] = []

    def answer(peer, request):
        if request.step == 2 and not taken:
            while not run.dir.complete_checkpoints():
                time.sleep(0.02)
            taken.append(fill(small_disk, leave_bytes=8 << 10))

    with StepPeer(run.dir, make_samples, max_steps=3, answer=answer):
        codes, outputs = run.train()
    assert codes == [1], "\n".join(outputs)
    assert "policy version 2" in outputs[0] and "No space left on device" in outputs[0], "\n".join(outputs)
    assert "free some space or lower trainer.weights.keep, then continue with --resume" in outputs[0]
    assert WeightStore(run.dir.weights).versions() == [0, 1] and run.dir.complete_checkpoints() == [1]
    taken[0].unlink()
    config = run.config.model_copy(update={"run": run.config.run.model_copy(update={"resume": True})})
    with StepPeer(run.dir, make_samples, max_steps=3):
        codes, outputs = run.write(config).train()
    assert codes == [0], "\n".join(outputs)
    assert list(effective(run.dir.ledger)) == [1, 2, 3] and run.dir.complete_checkpoints()[-1] == 3
