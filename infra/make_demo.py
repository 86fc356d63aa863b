"""Pack a small finished run for `composer view --demo`: python -m infra.make_demo outputs/a1"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

from composer_prime.cli.view_command import DEMO

_FILES = (
    "config.json",
    "run_id",
    "metrics.jsonl",
    "events.jsonl",
    "costs.jsonl",
    "rollouts/eval_*.jsonl",
    "rollouts/step_*0.jsonl",
)


def pack(run: Path, target: Path) -> None:
    """Write what the page reads of `run`, without what names this machine."""
    with tarfile.open(target, "w:xz") as archive:
        for path in sorted(path for pattern in _FILES for path in run.glob(pattern)):
            entry = archive.gettarinfo(path, f"{run.name}/{path.relative_to(run)}")
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            data = path.read_bytes()
            if path.name == "config.json":
                values = json.loads(data)
                values["run"] |= {"output_dir": "outputs", "import_from": []}
                data = json.dumps(values).encode()
            if path.name == "events.jsonl":
                data = b"".join(line for line in data.splitlines(keepends=True) if b" /" not in line)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    pack(Path(sys.argv[1]), DEMO)
    print(f"{DEMO}: {DEMO.stat().st_size / 1000:.0f} kB")
