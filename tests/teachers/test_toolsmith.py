"""Replays in processes of their own: the first call, and toolsmith traces with the three tiny teachers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from composer_prime.run.costs import read_costs
from composer_prime.traces.records import read_pairs, read_records, state_lines

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


TOML = Path(__file__).with_name("toolsmith.toml").read_text()


def run(*words: str | Path, status: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True, timeout=560)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


# A run replays its own rollouts while it trains, and replay-DPO trains its pairs; its states replayed again
# cost no call; the report measures them.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replay_online_and_from_the_cache(tmp_path: Path) -> None:
    toml = tmp_path / "t.toml"
    toml.write_text(TOML.replace("OUT", str(tmp_path)))
    run("trainer.main", "@", toml)
    folder = tmp_path / "t"
    pairs = list(read_pairs(folder / "pairs.jsonl"))
    records = list(read_records(folder / "pairs.votes.jsonl"))
    assert pairs and {pair.pair_id for pair in pairs} == {name for record in records for name in record.pairs}
    assert {vote.family for record in records for vote in record.votes} <= {f"tiny-teacher_{x}" for x in "abc"}
    assert all(pair.state.tools for pair in pairs)
    replayed = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"replay/' in line]
    trained = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if '"dpo/pairs"' in line
    ]
    assert trained[0]["dpo/pairs"] == 0 and max(line["dpo/pairs"] for line in trained) == 4
    # What was under way when the run ended is in the file and not yet counted.
    assert 0 <= len(pairs) - replayed[-1]["replay/pairs"] <= 8

    states = tmp_path / "states.jsonl"
    run("composer_prime.cli.main", "ingest", folder / "rollouts", "-o", states)
    few = tmp_path / "few.jsonl"
    few.write_bytes(b"".join(islice(state_lines(states), 40)))
    once, again = tmp_path / "once.jsonl", tmp_path / "again.jsonl"
    command = ("composer_prime.cli.main", "replay", few)
    assert "40 replayed" in run(*command, "-o", once, "@", toml)
    shown = run(*command, "-o", again, "@", toml)
    assert "0 called" in shown and not (tmp_path / "again.costs.jsonl").exists()
    first, second = ([pair.pair_id for pair in read_pairs(path)] for path in (once, again))
    assert set(first) == set(second) and first
    assert all(line["usd"] == 0 for line in read_costs(tmp_path / "once.costs.jsonl"))
