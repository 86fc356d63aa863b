"""The first call to a teacher holds up neither the event loop nor its own clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPLAY = """
import asyncio, sys, threading
from pathlib import Path
from loopback import Endpoint, overrule, run_config, serving, state
from composer_prime.traces.replay.replay import opened

PART = "openai.resources.chat.completions"
imported = []

def note(event, given):
    if event == "import" and given[0].startswith("openai"):
        imported.append(threading.current_thread() is threading.main_thread())

async def main(folder):
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = run_config(folder, endpoint.url)
        assert PART not in sys.modules
        sys.addaudithook(note)
        files = {name: folder / f"{name}.jsonl" for name in ("pairs", "votes", "costs")}
        async with opened(config, **files) as replay:
            assert PART in sys.modules and imported and not any(imported)
            before = len(imported)
            progress = await replay.run([state(0)])
            assert progress.pairs == 1 and imported[before:] == []

asyncio.run(main(Path(sys.argv[1])))
"""


# The client is imported in a thread while the pool is opened, and nothing of it once a call may be made: meanwhile an
# orchestrator hears its nodes, and no endpoint's time holds it. In a process of its own, where nobody imported it yet.
def test_the_client_is_imported_before_the_first_call(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", REPLAY, str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
