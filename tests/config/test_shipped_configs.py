"""Every shipped configuration: it resolves, states only what differs from its base, and differs in its loss terms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_prime.config.layers import merge_layers, read_table_file, read_with_bases
from composer_prime.config.load import resolve
from composer_prime.config.orchestrator import TOOL_LOOP
from composer_prime.config.root import Config

CONFIGS = Path(__file__).parents[2] / "configs"
LADDERS = ("", "smollm2", "qwen3-8b", "code")
_MAY_DIFFER = (
    "run.name",
    "orchestrator.hints",
    "orchestrator.preferences",
    "channels.sdpo",
    "channels.replay_dpo",
    "trainer.micro_batch_tokens",
)
SHIPPED = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.toml"))
BASED = [name for name in SHIPPED if "base" in read_table_file(str(CONFIGS / name))]


def resolved(ladder: str, rung: str, *words: str):
    return resolve(["@", str(CONFIGS / ladder / f"{rung}.toml"), *words])


def without_loss_terms(ladder: str, rung: str) -> dict[str, Any]:
    """The configuration without its name, SDPO, replay-DPO, and what feeds these two."""
    values = json.loads(resolved(ladder, rung).model_dump_json())
    for path in _MAY_DIFFER:
        section, key = path.split(".")
        values[section].pop(key)
    return values


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    values = {}
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


@pytest.mark.parametrize("name", BASED)
def test_a_file_with_a_base_states_only_what_differs(name):
    # Every key that such a file sets has another value in the resolved configuration of its base.
    *base, own = read_with_bases(str(CONFIGS / name))
    before = flat(Config.model_validate(merge_layers(base)).model_dump(mode="json"))
    after = flat(resolve(["@", str(CONFIGS / name)]).model_dump(mode="json"))
    stated = [key for key in flat(own.values) if key in before and before[key] == after[key]]
    assert base and stated == []
    sections = {"run", "orchestrator", "trainer", "channels", "diloco"}
    if name in ("qwen3-8b/code-a1.toml", "code/native.toml", "code/native-sft.toml"):
        sections.add("model")  # Other tasks, and so a longer context.
    assert {key.split(".")[0] for key in flat(own.values)} <= sections


def test_the_later_rungs_have_bases():
    assert {f"{ladder}/{rung}.toml".lstrip("/") for ladder in LADDERS for rung in ("a2", "a3", "a4")} <= set(BASED)


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("rung", ["a2", "a3", "a4"])
def test_a_rung_is_a1_and_its_loss_terms(ladder, rung):
    # Same seed, steps, tasks and optimizer, so that rungs can be compared. SDPO: a2 and a4; replay-DPO: a3 and a4.
    config = resolved(ladder, rung)
    assert without_loss_terms(ladder, rung) == without_loss_terms(ladder, "a1")
    assert (config.channels.sdpo.weight > 0, config.channels.replay_dpo.weight > 0) == (rung != "a3", rung != "a2")
    assert (config.orchestrator.hints is not None) == (rung != "a3")
    assert config.run.name == (f"{ladder}-{rung}" if ladder else rung)


@pytest.mark.parametrize("ladder", LADDERS)
def test_the_last_rung_is_a2_and_a3(ladder):
    # a4 is based on a2; what it adds is what a3 adds.
    *_, a3 = read_with_bases(str(CONFIGS / ladder / "a3.toml"))
    *_, a4 = read_with_bases(str(CONFIGS / ladder / "a4.toml"))
    differ = {key for key, value in flat(a3.values).items() if flat(a4.values).get(key) != value}
    assert differ <= {"run.name", "trainer.micro_batch_tokens"} and flat(a4.values).keys() <= flat(a3.values).keys()


@pytest.mark.parametrize("rung", ["a2", "a3", "a4"])
def test_a_rung_with_coding_tasks_is_the_rung_with_other_tasks(rung):
    # configs/qwen3-8b/code-aN differs from code-a1 as aN differs from a1, and all of them play in sandboxes.
    config, first, plain = (resolved("qwen3-8b", name) for name in (f"code-{rung}", "code-a1", rung))
    assert without_loss_terms("qwen3-8b", f"code-{rung}") == without_loss_terms("qwen3-8b", "code-a1")
    assert (config.channels.sdpo, config.channels.replay_dpo) == (plain.channels.sdpo, plain.channels.replay_dpo)
    assert (config.orchestrator.hints is None) == (plain.orchestrator.hints is None)
    assert config.orchestrator.source[0].runtime.type == "bubblewrap"
    assert config.completion_length == config.model.max_context == 24576
    assert config.run.name == f"qwen3-8b-code-{rung}" and first.channels.sdpo.weight == 0


@pytest.mark.parametrize("ladder", LADDERS)
def test_every_ladder_measures_itself(ladder):
    # a0 scores the start model on the held-out tasks of a1, which evaluates while it trains. Replay-DPO has the weight
    # that was measured as harmless; 0.1 was not (docs/reference/results.md).
    a0, a1 = resolved(ladder, "a0"), resolved(ladder, "a1")
    assert (a0.run.max_steps, a0.model, a0.orchestrator.source) == (0, a1.model, a1.orchestrator.source)
    assert a1.orchestrator.eval.every_steps > 0 and all(source.eval_taskset for source in a1.orchestrator.source)
    assert all(source.taskset["id"] for source in a1.orchestrator.source)
    assert [resolved(ladder, rung).channels.replay_dpo.weight for rung in ("a3", "a4")] == [0.02, 0.02]


@pytest.mark.parametrize("words", [["a1.toml", "diloco/peer.toml"], ["diloco/two-clusters.toml"]])
def test_joint_runs_carry_the_steps_of_a_delay(words):
    # Overwritten steps are a quarter of the work at H = 4 and P = 2 (docs/explanation/joint-runs.md).
    diloco = resolve([word for name in words for word in ("@", str(CONFIGS / name))]).diloco
    assert diloco is not None and diloco.delay > 0 and diloco.mixing == "carry"


@pytest.mark.parametrize("ladder", LADDERS)
@pytest.mark.parametrize("rung", ["a1", "a2", "a3", "a4"])
def test_another_objective_brings_its_own_correction(ladder, rung):
    # No rung sets what follows from dr_grpo: gspo with dppo's mask would have no clip.
    assert resolved(ladder, rung).channels.policy.correction == "dppo"
    chosen = resolved(ladder, rung, "--channels.policy.objective", "gspo").channels.policy
    assert (chosen.objective, chosen.correction) == ("gspo", "none")


@pytest.mark.parametrize(
    ("ladder", "rung", "tokens"),
    [
        ("", "a1", 384),
        ("", "a2", 384),
        ("code", "a1", 288),
        ("smollm2", "a1", 24),
        ("qwen3-8b", "a1", 4096),
        ("qwen3-8b", "a4", 4096),
    ],
)
def test_the_length_divisor_is_what_a_rollout_may_sample(ladder, rung, tokens):
    # Not the context. A sequence trains the tokens of all its turns: six of 64 tokens in toolsmith, which is as much as
    # its context of 384; one turn elsewhere.
    config = resolved(ladder, rung)
    assert config.completion_length == tokens
    longer = resolved(ladder, rung, "--model.max_context", "20000", "--trainer.micro_batch_tokens", "40000")
    assert longer.completion_length == tokens


def test_the_length_divisor_follows_the_harness():
    # Its max_turns, and the default of the harness that ships; the context where a harness states no limit.
    def length(*words: str) -> int:
        return resolved("", "a1", "--model.max_context", "2048", *words).completion_length

    harness = "--orchestrator.source.0.harness."
    assert length(f"{harness}id", TOOL_LOOP) == 6 * 64
    assert length(f"{harness}id", TOOL_LOOP, f"{harness}max_turns", "3") == 3 * 64
    assert length(f"{harness}id", TOOL_LOOP, f"{harness}max_turns", "99") == 2048
    assert length(f"{harness}id", "another.agent") == 2048
    assert length(f"{harness}id", "another.agent", "--channels.policy.max_completion_length", "512") == 512


@pytest.mark.parametrize(("ladder", "largest_norm"), [("", 0.048), ("smollm2", 1.09)])
@pytest.mark.parametrize("rung", ["a1", "a2", "a3", "a4"])
def test_the_gradient_clip_of_a_shipped_file_can_act(ladder, largest_norm, rung):
    # The largest norm that was measured: 0.048 in a4 (0.012 in a1, 60 steps), 1.09 in smollm2/a1 (4 steps). A clip that
    # is twenty times as large, as 1.0 was for the tiny model, never acts.
    assert resolved(ladder, rung).trainer.optim.max_grad_norm < 3 * largest_norm
