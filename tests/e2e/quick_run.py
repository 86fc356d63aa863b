"""A real run of the launcher with all its roles, small enough for a test, and ways to look at and end its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from waiting import wait_until

from composer_prime.run.run_dir import RunDir

ROOT = Path(__file__).parents[2]
MARK = "COMPOSER_TEST_RUN"
ROLES = {"orchestrator": "orchestrator", "trainer": "trainer.train", "node": "inference"}
"""What a role's command line holds, by the name a test calls it."""


@dataclass
class QuickRun:
    """`trainer @ configs/a1.toml` (or another), cut down to a few small steps, in a folder of its own."""

    output_dir: Path
    name: str
    steps: int = 6
    settings: list[str] = field(default_factory=list)
    """Further `--key value` words."""
    config: str = "configs/a1.toml"
    process: subprocess.Popen | None = None

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.output_dir / self.name)

    def start(self, *flags: str) -> QuickRun:
        command = [
            sys.executable, "-m", "trainer.main", "@", str(ROOT / self.config),
            "--run.output_dir", str(self.output_dir), "--run.name", self.name, "--run.max_steps", str(self.steps),
            "--orchestrator.groups_per_step", "2", "--orchestrator.group_size", "4",
            "--orchestrator.eval.every_steps", "0", "--trainer.checkpoint.every_steps", "2",
            "--trainer.schedule.warmup_steps", "0",
            *self.settings, *flags,
        ]  # fmt: skip
        self.output_dir.mkdir(parents=True, exist_ok=True)
        with (self.output_dir / f"{self.name}.out").open("ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, MARK: self.name}, stdout=output, stderr=subprocess.STDOUT
            )
        return self

    def output(self) -> str:
        return (self.output_dir / f"{self.name}.out").read_text()

    def wait(self, timeout_s: float = 240) -> int:
        """The launcher's exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def trainer_lines(self) -> list[dict]:
        """The trainer's lines of metrics.jsonl, one a trained step."""
        if not self.run_dir.metrics.exists():
            return []
        lines = [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if "loss/total" in line]

    def wait_for(self, condition: Callable[[], object], log: Path | None = None, timeout_s: float = 600) -> None:
        """While the launcher lives. `log`: of another process, to show beside the output where this takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            said = self.output()[-3000:] + (log.read_text()[-3000:] if log and log.exists() else "")
            assert self.process is not None and self.process.poll() is None, said
            assert time.monotonic() < deadline, f"waited {timeout_s} s: {said}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: max((line["step"] for line in self.trainer_lines()), default=0) >= step)

    def members(self) -> list[psutil.Process]:
        """Every living process of this run, the launcher included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.name and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def pid_of(self, role: str) -> int:
        """The process of `role` that the launcher started."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if ROLES[role] in " ".join(child.cmdline()):
                return child.pid
        raise AssertionError(f"no {role} among {[child.cmdline() for child in self.members()]}")

    def wait_until_gone(self, timeout_s: float = 200) -> None:
        """Asserts that no process of the run outlives it."""
        wait_until(lambda: not self.members(), "the end of all processes", timeout_s)

    def stop(self) -> None:
        for process in self.members():
            try:
                process.kill()
            except psutil.Error:
                continue
