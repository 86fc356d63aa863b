"""Measure how fast traces are ingested, and in how much memory, beside a plain json.loads of the same lines.

    python benchmarks/ingest.py --mib 2048
    python benchmarks/ingest.py --mib 64 --kinds claude_code messages
    python benchmarks/ingest.py --quick

Each measurement is a process of its own, started after the file is in the page cache. Both sides have both clocks.
`cpu` is the process's CPU time, which other work on the machine hardly changes. `wall` is what a user waits, and means
something on a quiet machine only. `of json` is a reader's MiB/s as a share of json.loads', by the same clock.
`json.loads` decodes every line and drops it: a bound that no reader can beat. `ingest` writes states to /dev/null, with
and without masking. Sessions are made from a seed: prompts, commands, listings of source text, a few errors, some
thinking.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TEXT = "def return self value path import test assert none raise error index config model token state"
WORDS = _TEXT.split()
PROGRAMS = {
    "json.loads": "import json\nfor line in open(path, 'rb'): json.loads(line); records += 1",
    "ingest": "run(True)",
    "ingest --no-mask": "run(False)",
}
FRAME = """
import resource, sys, time
from pathlib import Path
path, program, records, states = Path(sys.argv[1]), sys.argv[2], 0, 0
def run(mask):
    global records, states
    from composer_prime.traces.ingest.ingest import ingest
    from composer_prime.traces.ingest.trace_file import Options, Tally
    from composer_prime.traces.records import compressed_lines, write_state
    tally = Tally()
    with compressed_lines(Path("/dev/null")) as sink:
        for state in ingest(path, tally, Options(mask=mask)):
            sink.write(write_state(state))
    records, states = tally.seen, tally.states
cpu, wall = time.process_time(), time.perf_counter()
exec(program)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
print(records, states, cpu, wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def claude_code(rng: random.Random, session: int) -> Iterator[dict]:
    """One session of 30 turns."""
    parent, name = None, f"s{session}"
    for turn in range(30):
        own = {"sessionId": name, "isSidechain": False, "version": "2.0.0", "cwd": "/home/someone/project"}
        ask = {"type": "user", "uuid": f"{name}u{turn}", "parentUuid": parent, **own}
        yield ask | {"message": {"role": "user", "content": prose(rng, 40)}}
        call = {"type": "tool_use", "id": f"{name}t{turn}", "name": "Bash", "input": {"command": f"cat {turn}.py"}}
        blocks = [{"type": "thinking", "thinking": prose(rng, 60)}, {"type": "text", "text": prose(rng, 15)}, call]
        for index, block in enumerate(blocks):
            message = {"id": f"{name}m{turn}", "role": "assistant", "model": "claude-sonnet-4", "content": [block]}
            line = {"type": "assistant", "uuid": f"{name}a{turn}{index}", "parentUuid": f"{name}u{turn}", **own}
            yield line | {"message": message}
        seen = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": prose(rng, 300), "is_error": turn % 5 == 0}
        ]
        parent = f"{name}r{turn}"
        yield {"type": "user", "uuid": parent, "parentUuid": f"{name}a{turn}2", **own} | {
            "message": {"role": "user", "content": seen}
        }


def messages(rng: random.Random, trace: int) -> Iterator[dict]:
    """One conversation of 20 turns in a line."""
    messages = [{"role": "system", "content": prose(rng, 200)}, {"role": "user", "content": prose(rng, 100)}]
    for _ in range(20):
        messages += [{"role": "assistant", "content": prose(rng, 60)}, {"role": "user", "content": prose(rng, 250)}]
    yield {"messages": messages, "traj_id": f"t{trace}", "model": "gpt-4o"}


KINDS = {"claude_code": claude_code, "messages": messages}


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + f"\n    x{rng.randrange(10**6)} = {rng.random()}"


def make(path: Path, kind: str, size_bytes: int, seed: int = 0) -> None:
    rng, written, number = random.Random(seed), 0, 1_000_000 * seed
    with path.open("wb") as file:
        while written < size_bytes:
            written += sum(file.write(json.dumps(line).encode() + b"\n") for line in KINDS[kind](rng, number))
            number += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One reader on one file."""

    records: int
    states: int
    cpu_s: float
    wall_s: float
    peak_kib: int


def measure(path: Path, program: str) -> Measured:
    command = [sys.executable, "-c", FRAME, str(path), program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records, states, cpu_s, wall_s, peak = done.stdout.split()
    return Measured(
        records=int(records), states=int(states), cpu_s=float(cpu_s), wall_s=float(wall_s), peak_kib=int(peak)
    )


def row(name: str, mib: float, found: Measured, floor: Measured) -> str:
    """`floor`: json.loads on the same file."""
    columns = [f"{name:<18} {found.records:>9,} {found.states:>9,}"]
    for seconds, least in ((found.cpu_s, floor.cpu_s), (found.wall_s, floor.wall_s)):
        columns.append(
            f"{seconds:>8.2f} {mib / seconds:>8.1f} {found.states / seconds:>10,.0f} {least / seconds:>8.1%}"
        )
    return " | ".join([*columns, f"{found.peak_kib / 1024:>8.1f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of each file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="one MiB")
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "traces.jsonl"
            make(path, kind, (1 if options.quick else options.mib) << 20)
            mib = path.stat().st_size / 2**20
            clocks = [f"{f'{clock} s':>8} {'MiB/s':>8} {'states/s':>10} {'of json':>8}" for clock in ("cpu", "wall")]
            print(f"{kind}, {mib:.0f} MiB; `of json`: share of json.loads' MiB/s by the same clock")
            print(" | ".join([f"{'reader':<18} {'records':>9} {'states':>9}", *clocks, f"{'peak MiB':>8}"]))
            floor: Measured | None = None
            for name, program in PROGRAMS.items():
                found = measure(path, program)
                floor = floor or found
                print(row(name, mib, found, floor), flush=True)


if __name__ == "__main__":
    main()
