"""The files that a finished run leaves are the contract that reports and users read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from quick_run import QuickRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("learning run")]

TRAINER_KEYS = {
    "reward/mean", "reward/std", "loss/total", "loss/policy", "tokens/trained", "policy/mismatch_kl",
    "policy/masked_fraction", "policy/staleness_max", "policy/entropy", "optim/grad_norm", "optim/lr", "time/step_s",
    "time/wait_s", "time/forward_backward_s", "memory/peak_bytes",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = QuickRun(tmp_path_factory.mktemp("run"), f"e2e-{os.getpid()}-whole", steps=3)
    run.settings += ["--orchestrator.eval.every_steps", "3", "--orchestrator.eval.tasks", "8"]
    assert run.start().wait() == 0, run.output()[-3000:]
    yield run
    run.stop()


def test_each_step_has_one_trainer_line_with_the_promised_keys(finished):
    """Readers of metrics.jsonl may rely on these keys, as numbers."""
    lines = finished.trainer_lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        missing = {key for key in TRAINER_KEYS if not isinstance(line.get(key), int | float)}
        assert not missing


def test_every_metric_is_described(finished):
    """docs/reference/metrics.md names every key of every role's lines. `<x>` there stands for a name."""
    words = re.findall(r"`([a-z]\S*?)`", (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text())
    known = re.compile("|".join(re.sub("<[^>]+>", ".+", word) + "(_low|_high)?" for word in words))
    lines = [json.loads(line) for line in finished.run_dir.metrics.read_text().splitlines()]
    assert {line["role"] for line in lines} == {"launcher", "orchestrator", "trainer"}
    assert not {key for line in lines for key in line if not known.fullmatch(key)}


def test_rollouts_are_written_one_object_a_line(finished):
    """Each rollout shows its task, reward, versions and turns."""
    rows = [json.loads(line) for line in finished.run_dir.rollouts(1).read_text().splitlines()]
    assert len(rows) >= 8
    for row in rows:
        assert {"task_id", "source", "reward", "parts", "turns"} <= row.keys()
        assert row["turns"][-1]["role"] in ("assistant", "tool")


def test_a_fresh_trainer_and_sampler_agree(finished):
    """On policy (staleness 0) the trainer's logprobs are the sampler's: mismatch KL is numerical noise."""
    fresh = [line for line in finished.trainer_lines() if line["policy/staleness_max"] == 0]
    assert fresh
    assert all(abs(line["policy/mismatch_kl"]) < 1e-5 for line in fresh)


def test_final_loads_with_transformers(finished):
    """final/ is a plain Hugging Face folder with tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished.run_dir.final)
    tokenizer = AutoTokenizer.from_pretrained(finished.run_dir.final)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Reverse 43."}], return_tensors="pt")
    assert model(**ids).logits.isfinite().all()


def test_a_second_start_in_the_same_folder_is_refused(finished):
    """An existing run is never overwritten by accident; the message names both ways on."""
    again = QuickRun(finished.output_dir, finished.name, steps=3)
    assert again.start().wait(200) != 0
    assert "--resume" in again.output() and "overwrite" in again.output()
