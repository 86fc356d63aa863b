"""An orchestrator in a process of its own, to be killed: `python orch_process.py RUN_DIR` reads RUN_DIR/config.json."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from orch_peers import MODEL, RUN_ID, ScriptedPool, draw

from composer_prime.config import load
from composer_prime.run.run_dir import RunDir
from orchestrator import pipeline


async def serve(root: Path) -> None:
    run_dir = RunDir(root)
    pool = ScriptedPool(played=root / "played.txt")
    pool.pause_s = lambda request: 0.4 * draw(request.rollout_id)
    config = load.read_config(run_dir.config)
    pipeline.worker_pools = lambda *_: {source.name: pool for source in config.orchestrator.source}
    await pipeline.Pipeline(config, run_dir, RUN_ID, MODEL).run()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
