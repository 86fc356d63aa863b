"""How fast are traces ingested, and in how much memory, beside a plain json.loads of the same lines?

    python benchmarks/ingest.py --mib 2048
    python benchmarks/ingest.py --mib 64 --kinds claude_code messages

Each measurement is a process of its own, started after the file is in the page cache; seconds are of its CPU time, so
that what else the machine does does not count. `json.loads` decodes every line and drops it: a floor that no reader can
pass. `ingest` writes states to /dev/null, with and without masking. Sessions are made from a seed: prompts, commands,
listings of source text, an error now and then, some thinking.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

WORDS = [
    "def",
    "return",
    "self",
    "value",
    "path",
    "import",
    "test",
    "assert",
    "none",
    "raise",
    "error",
    "index",
    "config",
    "model",
    "token",
    "state",
    "for",
    "in",
    "if",
    "not",
]
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
    from orchestrator.ingest.formats import Options, ingest
    from orchestrator.ingest.tally import Tally
    from composer_prime.traces import write_state
    tally = Tally()
    with open("/dev/null", "wb") as out:
        for state in ingest(path, tally, Options(mask=mask)):
            out.write(write_state(state))
    assert tally.balanced
    records, states = tally.seen, tally.states
start = time.process_time()
exec(program)
print(records, states, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
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
    said = [{"role": "system", "content": prose(rng, 200)}, {"role": "user", "content": prose(rng, 100)}]
    for _ in range(20):
        said += [{"role": "assistant", "content": prose(rng, 60)}, {"role": "user", "content": prose(rng, 250)}]
    yield {"messages": said, "traj_id": f"t{trace}", "model": "gpt-4o"}


KINDS = {"claude_code": claude_code, "messages": messages}


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + f"\n    x{rng.randrange(10**6)} = {rng.random()}"


def make(path: Path, kind: str, size_bytes: int) -> None:
    rng, written, number = random.Random(0), 0, 0
    with path.open("wb") as file:
        while written < size_bytes:
            written += sum(file.write(json.dumps(line).encode() + b"\n") for line in KINDS[kind](rng, number))
            number += 1


def measure(path: Path, program: str) -> tuple[int, int, float, int]:
    """(records, states, seconds, peak KiB)."""
    command = [sys.executable, "-c", FRAME, str(path), program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    records, states, seconds, peak = done.stdout.split()
    return int(records), int(states), float(seconds), int(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of each file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    heads = f"{'file':<24} {'reader':<18} {'records':>9} {'states':>9}"
    print(f"{heads} {'s':>7} {'MiB/s':>7} {'states/s':>9} {'peak MiB':>9}")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "traces.jsonl"
            make(path, kind, options.mib << 20)
            size = path.stat().st_size / 2**20
            for name, program in PROGRAMS.items():
                records, states, seconds, peak = measure(path, program)
                print(
                    f"{f'{kind}, {size:.0f} MiB':<24} {name:<18} {records:>9,} {states:>9,} {seconds:>7.1f} "
                    f"{size / seconds:>7.1f} {states / seconds:>9,.0f} {peak / 1024:>9.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
