"""One run of two ranks with two threads each that is ended again and again: no sample is lost or trained twice."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from quick_run import QuickRun

from composer_prime.run.ledger import check_ledger, effective

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
KINDS = (
    *("KILL node", "full disk", "TERM everyone", "KILL launcher", "INT launcher", "KILL orchestrator", "TERM rank 0"),
    *("KILL rank 0", "TERM rank 1", "full disk", "KILL rank 1", "INT everyone", "KILL worker", "TERM launcher"),
    *("full disk", "TERM rank 0", "KILL launcher", "TERM launcher", "TERM everyone", "INT launcher"),
)
COMMANDS = {"launcher": "trainer.main", "rank": "trainer.train", "worker": "workers.worker", "node": "bin/inference"}
COMMANDS |= {"orchestrator": "bin/orchestrator", "everyone": ""}


@pytest.fixture
def run(tmp_path):
    """A run whose directory is a disk of its own."""
    run = QuickRun(tmp_path, f"ends-{os.getpid()}", 500, ["--trainer.ranks", "2", "--trainer.threads", "2"])
    disk = run.run_dir.root
    disk.mkdir()
    if subprocess.run([shutil.which("mount") or "false", "-t", "tmpfs", "-o", "size=256m", "tmpfs", disk]).returncode:
        pytest.skip("a tmpfs cannot be mounted here (needs Linux and CAP_SYS_ADMIN)")
    yield run
    run.stop()
    subprocess.run(["umount", "--lazy", disk], check=True)


def end(run: QuickRun, what: str, role: str, rank: str) -> None:
    """Fill the disk until the launcher has ended, or signal the processes of a role."""
    ballast = run.run_dir.root / "ballast"
    while role == "disk" and run.process.poll() is None:
        with suppress(OSError), ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), shutil.disk_usage(ballast).free)
        time.sleep(0.05)
    ballast.unlink(missing_ok=True)
    for process in run.members() if role in COMMANDS else []:
        with suppress(psutil.Error):
            if COMMANDS[role] in " ".join(process.cmdline()) and rank in ("", process.environ().get("RANK")):
                process.send_signal(signal.Signals[f"SIG{what}"])


def steps_of(run: QuickRun) -> list[dict]:
    """The ledger's lines of steps, of those too that were repeated later."""
    lines = run.run_dir.ledger.read_text().splitlines() if run.run_dir.ledger.exists() else []
    return [line for line in map(json.loads, lines) if "step" in line]


def wait_for(run: QuickRun, count: int) -> None:
    run.wait_for(lambda: len(steps_of(run)) >= count)


def test_a_run_that_ends_in_all_ways_trains_each_sample_once(run):
    # Each end comes at a drawn point; COMPOSER_ENDS=20 takes all. A stop loses no step, anything else at most those
    # after the last checkpoint, which the next start repeats with the same samples. A node or worker ends nothing.
    points, screen = random.Random(3), ""
    for kind in KINDS[: int(os.environ.get("COMPOSER_ENDS", "2"))]:
        what, role, rank = f"{kind} ".split(" ")[:3]
        seconds, before = points.uniform(0, 1.5), len(steps_of(run))
        if run.process is None or run.process.poll() is not None:
            run.start(*["--resume"] * bool(before))
        wait_for(run, before + points.randint(1, 2))
        time.sleep(seconds)
        saved = run.run_dir.complete_checkpoints()
        end(run, what, role, rank)
        if kind in ("KILL node", "KILL worker"):
            wait_for(run, len(steps_of(run)) + 3)
            continue
        status, shown = run.wait(600), len(screen)
        run.wait_until_gone(600)
        screen, kept = run.output(), max(run.run_dir.complete_checkpoints(), default=0)
        lost = [line["step"] for line in steps_of(run)[before:] if line["step"] > kept]
        print(f"{kind}, {seconds:.1f} s after {before=}: {status=} {kept=} {lost=}\n{screen[shown:][-1500:]}")
        assert status and kept >= max(saved, default=0) and not check_ledger(run.run_dir.ledger)
        assert role == "disk" or what == "KILL" or not lost
        assert role != "disk" or all(word in screen[shown:] for word in (str(run.run_dir.root), "No space left"))
    run.steps = 1 + max(effective(run.run_dir.ledger))
    assert run.start("--resume").wait(600) == 0, run.output()[-3000:]
    assert not check_ledger(run.run_dir.ledger) and max(effective(run.run_dir.ledger)) == run.steps
    assert len({(line["step"], frozenset(line["sample_ids"])) for line in steps_of(run)}) == run.steps
