"""The first call to a teacher holds up neither the event loop nor its own clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPLAY = """
import asyncio, sys
from pathlib import Path
from loopback import Endpoint, overrule, run_config, serving, state
from composer_prime.traces.replay.replay import open_replay

imported = []

def note(event, arguments):
    if event == "import" and arguments[0].startswith(("httpx", "httpcore", "h11", "genai_prices", "openai")):
        imported.append(arguments[0])

async def main(folder):
    async with serving(Endpoint(answers=overrule)) as endpoint:
        config = run_config(folder, endpoint.url)
        files = {name: folder / f"{name}.jsonl" for name in ("pairs", "votes", "costs")}
        async with open_replay(config, **files) as replay:
            sys.addaudithook(note)
            progress = await replay.run([state(0)])
            assert progress.pairs == 1 and imported == [], imported

asyncio.run(main(Path(sys.argv[1])))
"""


# The client and the price list are imported before a call may be made, so that meanwhile an orchestrator hears its
# nodes, and the endpoint's time holds no import. In a process of its own, where nobody imported them yet.
@pytest.mark.process
def test_the_client_is_imported_before_the_first_call(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    words = [sys.executable, "-c", REPLAY, str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
