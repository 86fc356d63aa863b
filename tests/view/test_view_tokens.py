"""Tokens from a sample of the orchestrator to the page: recorded, found by the rollout's id, and turned into text."""

from __future__ import annotations

import numpy as np

from composer_prime.run.run_dir import RunDir
from composer_prime.view.rollout_payload import rollout_tokens
from orchestrator.rollouts import rollout_log
from orchestrator.rollouts.groups import FinishedGroup, GroupOutcome
from tests.rollouts_made import PLAN, Step, play


# What the run records of a sample gives back its text, and marks exactly what the policy sampled.
def test_recorded_tokens_become_text(tmp_path):
    run_dir = RunDir(tmp_path)
    played = play("tiny", "Add 2 and 3.", [Step("It is 5.")], reward=1.0)
    group = FinishedGroup(plan=PLAN, outcome=GroupOutcome.READY, rollouts=[played.rollout], samples=played.samples)
    rollout_log.write(run_dir.rollout_tokens(4), rollout_log.token_lines(group))
    entry = {"kind": "step", "step": 4, "rollout_id": played.rollout.rollout_id}
    (sample,) = rollout_tokens(run_dir, entry, {"model": {"path": "tiny"}})
    assert "".join(sample["texts"]).endswith("It is 5.<|im_end|>")
    sampled = "".join(text for text, flag in zip(sample["texts"], sample["sampled"], strict=True) if flag)
    assert sampled == "It is 5.<|im_end|>"
    logprobs = np.array(sample["logprobs"])[np.array(sample["sampled"], bool)]
    assert np.array_equal(logprobs, np.full(len(logprobs), -0.5))
    assert len(sample["advantages"]) == len(sample["mask"]) == len(sample["texts"])


# The trainer's figures stand at their tokens, whichever rank wrote them; without a hinted turn there is no divergence.
def test_figures_of_the_trainer_join_the_tokens(tmp_path):
    run_dir = RunDir(tmp_path)
    played = play("tiny", "Add 2 and 3.", [Step("It is 5.")], reward=1.0)
    group = FinishedGroup(plan=PLAN, outcome=GroupOutcome.READY, rollouts=[played.rollout], samples=played.samples)
    rollout_log.write(run_dir.rollout_tokens(4), rollout_log.token_lines(group))
    entry = {"kind": "step", "step": 4, "rollout_id": played.rollout.rollout_id}
    (before,) = rollout_tokens(run_dir, entry, {"model": {"path": "tiny"}})
    trained = np.flatnonzero(before["mask"])
    figures = {"sample_id": before["sample_id"], "mismatch": [0.25] * len(trained), "divergence": []}
    rollout_log.write(run_dir.trained_tokens(4, 0), [figures | {"sample_id": "g000099-0/0"}])
    rollout_log.write(run_dir.trained_tokens(4, 1), [figures])
    (plain,) = rollout_tokens(run_dir, entry, {"model": {"path": "tiny"}})
    assert np.array_equal(np.flatnonzero(plain["mismatch"]), trained) and "divergence" not in plain
    hinted = figures | {"divergence": [[int(trained[1]), [0.5, 0.75]]]}
    rollout_log.write(run_dir.trained_tokens(4, 1), [hinted])
    (sample,) = rollout_tokens(run_dir, entry, {"model": {"path": "tiny"}})
    assert np.flatnonzero(sample["divergence"]).tolist() == [trained[1], trained[1] + 1]
    assert len(sample["divergence"]) == len(sample["mismatch"]) == len(sample["texts"])


# Another rollout, a step that recorded none, and a model whose tokenizer is gone are no errors.
def test_what_was_not_recorded_is_empty(tmp_path):
    run_dir = RunDir(tmp_path)
    played = play("tiny", "Add 2 and 3.", [Step("5")])
    group = FinishedGroup(plan=PLAN, outcome=GroupOutcome.READY, rollouts=[played.rollout], samples=played.samples)
    rollout_log.write(run_dir.rollout_tokens(4), rollout_log.token_lines(group))
    entry = {"kind": "step", "step": 4, "rollout_id": "g000003-0"}
    assert rollout_tokens(run_dir, entry | {"rollout_id": "g000003-01"}, {}) == []
    assert rollout_tokens(run_dir, entry | {"step": 5}, {}) == []
    assert rollout_tokens(run_dir, entry | {"kind": "eval"}, {}) == []
    (sample,) = rollout_tokens(run_dir, entry, {"model": {"path": str(tmp_path / "gone")}})
    assert sample["texts"][0].startswith("#")


# The node that sampled a rollout stands in its line.
def test_the_line_names_the_nodes():
    played = play("tiny", "Add 2 and 3.", [Step("5")])
    assert rollout_log.rollout_line(1, "s", played.rollout, "trained")["nodes"] == ["n"]
