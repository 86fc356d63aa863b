"""Groups with hints: what is attached, what is counted, and that nothing of it costs a rollout or stops the loop."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from endpoint_peer import chat_peer

from composer_prime.config.channels import ChannelsConfig
from composer_prime.config.hints import HintsConfig
from composer_prime.config.orchestrator import OrchestratorConfig
from composer_prime.errors import ConfigError
from composer_prime.packing.pack import common_prefix, pack, totals
from composer_prime.wire.types import flags, floats, ints
from examples.wrong_hints import WrongHints
from orchestrator.hints.generate import (
    ChatEndpoint,
    ErrorTurn,
    HintRequest,
    Templates,
    error_turn,
    find_errors,
    model_hint,
    raw_error,
    sibling_demonstration,
)
from orchestrator.hints.stage import HintPlacer, HintStage, check_kinds, own_parts
from orchestrator.rollouts.groups import FinishedGroup, FinishedRollout, GroupOutcome, score_group
from orchestrator.rollouts.rollout_log import rollout_line
from orchestrator.workers.pool import SessionRecord
from tests.chat_models import chat
from tests.rollouts_made import PLAN, TOOLS, PlayedRollout, Step, call, play

WRONG = Step(call("plus", "{}"), "Tool not found: plus", error=True, calls=[("plus", "{}")])
OTHER = Step(call("add", '{"a": 1}'), "Missing argument: b", error=True, calls=[("add", '{"a": 1}')])
GOOD = Step(call("add", '{"a": 1, "b": 2}'), "3", calls=[("add", '{"a": 1, "b": 2}')])
LAST = Step("3")
TEMPLATES = Templates.load()
TOOL_HINT = "Reminder: Available tools are: add, minus"
ARGUMENT_HINT = "Reminder: The arguments of add are: a (integer), b (integer)"


def stage(config: HintsConfig | None = None, *, limits: dict[str, int] | None = None, **parts: Any) -> HintStage:
    config = config or HintsConfig(max_turns=16)
    rules = partial(asyncio.to_thread, find_errors, TEMPLATES, set(config.detect))
    values = {
        "detectors": {"rules": rules},
        "layers": {"template": TEMPLATES.hint},
        "placer": HintPlacer(*chat("tiny")),
        **(limits or {"max_context": 384}),
    }
    return HintStage(config=config, **(values | parts))


def attached(made: HintStage, *played: PlayedRollout) -> list[PlayedRollout]:
    async def run():
        try:
            return await made.attach([(each.rollout, each.samples) for each in played])
        finally:
            await made.close()

    ended = asyncio.run(run())
    return [PlayedRollout(rollout, samples, []) for rollout, samples in ended]


def test_every_wrong_turn_gets_its_hint():
    # Two of four turns went wrong. The teacher of each is the student's context, the hint in it, and the same turn.
    played = play("tiny", "Add 1 and 2.", [GOOD, WRONG, OTHER, LAST])
    [done] = attached(stage(), played)
    first, second = done.samples[0].distillations
    assert [(first.turn, first.error), (second.turn, second.error)] == [(1, "tool_not_found"), (2, "argument_name")]
    student, tokenizer = ints(done.samples[0].input_ids), chat("tiny")[1]
    for made, hint in ((first, TOOL_HINT), (second, ARGUMENT_HINT)):
        teacher = ints(made.teacher_ids)
        assert teacher[made.teacher_start :].tolist() == student[made.start : made.end].tolist()
        before = tokenizer.decode(teacher[: made.teacher_start])
        assert before.replace("\n" + hint, "", 1) == tokenizer.decode(student[: made.start])
    assert done.rollout.hints == {
        "found": 2, "hinted": 2, "kind/argument_name": 1, "kind/tool_not_found": 1, "layer/template": 2,
    }  # fmt: skip
    line = rollout_line(1, "s", done.rollout, "trained")
    hinted = [(turn["turn"], turn["error"], turn["hint"]) for turn in line["turns"] if turn["hint"]]
    assert hinted[0] == (1, "tool_not_found", TOOL_HINT) and len(hinted) == 2
    assert line["tools"] == TOOLS


@pytest.mark.parametrize(
    ("scope", "turns", "place"), [("turn", [1], 1), ("rest", [1, 2, 3], 1), ("rollout", [0, 1, 2, 3], 0)]
)
def test_the_scope_of_a_hint(scope, turns, place):
    # The first error is in turn 1. Whatever is distilled, the hint stands once, before the scope's first turn, and what
    # the teacher reads without it is what the student read.
    played = play("tiny", "Add 1 and 2.", [GOOD, WRONG, OTHER, LAST])
    [done] = attached(stage(HintsConfig(scope=scope, max_turns=1 if scope == "turn" else 9)), played)
    made = done.samples[0].distillations
    assert [turn.turn for turn in made] == turns and done.rollout.hints["hinted"] == 1
    student, tokenizer = ints(done.samples[0].input_ids), chat("tiny")[1]
    span = next(span for span in done.samples[0].turns if span.turn == place)
    for turn in made:
        teacher = ints(turn.teacher_ids)
        assert teacher[turn.teacher_start :].tolist() == student[turn.start : turn.end].tolist()
        text = tokenizer.decode(teacher)
        assert text.replace("\n" + TOOL_HINT, "", 1) == tokenizer.decode(student[: turn.end])
        assert 0 < span.start - common_prefix(teacher, student) < 8
    # The trainer's rows have each hinted turn with its sample, without a second copy of its context.
    [[row]] = pack(done.samples, run_id="r", step=1, world_size=1, max_tokens=4096)
    assert len(row.turns) == len(turns) == totals(done.samples).distilled_turns
    assert row.lengths == [done.samples[0].num_tokens]


def test_distillations_survive_the_journal():
    [done] = attached(stage(), play("tiny", "Add 1 and 2.", [WRONG, LAST]))
    group = FinishedGroup(plan=PLAN, outcome=GroupOutcome.READY, rollouts=[done.rollout], samples=done.samples)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=FinishedGroup)
    assert again == group and again.samples[0].distillations


def test_switched_off_it_only_looks():
    # With SDPO's weight 0 the sample is the policy loss's own, byte for byte. The hint is only in the log.
    played = play("tiny", "Add 1 and 2.", [WRONG, LAST])
    [done] = attached(stage(distil=False), played)
    assert done.samples == played.samples
    assert done.rollout.hints["hinted"] == 1 and done.rollout.turns[1].hint == TOOL_HINT


@pytest.mark.parametrize(
    ("reason", "steps", "config", "limits"),
    [
        ("cut", [Step("x" * 3, "Tool not found: x", error=True, finish="length"), LAST], {}, None),
        ("no_hint", [Step("x", "the disk is on fire", error=True), LAST], {}, None),
        ("too_long", [WRONG, LAST], {}, dict(max_context=10)),
        ("max_turns", [WRONG, WRONG, LAST], {"max_turns": 1}, None),
    ],
)
def test_what_cannot_be_hinted_is_counted_by_reason(reason, steps, config, limits):
    played = play("tiny", "Add 1 and 2.", steps)
    [done] = attached(stage(HintsConfig(**config), limits=limits), played)
    counts = done.rollout.hints
    assert counts[f"skipped/{reason}"] == 1 and counts["found"] == len(steps) - 1
    assert counts.get("hinted", 0) == len(steps) - 2
    assert sum(len(sample.distillations) for sample in done.samples) == len(steps) - 2


def test_another_agents_turns_are_not_the_policys_to_learn():
    played = play("tiny", "Add 1 and 2.", [WRONG, LAST])
    user = SessionRecord(session_id="g000003-0", agent="user", trainable=False, reward=None)
    rollout = msgspec.structs.replace(played.rollout, sessions=[user])
    [done] = attached(stage(), PlayedRollout(rollout, played.samples, []))
    assert done.rollout.hints == {} and done.samples == played.samples


def test_a_failed_rollout_is_left_alone():
    played = play("tiny", "Add 1 and 2.", [WRONG, LAST])
    [done] = attached(stage(), PlayedRollout(played.rollout, [], []))
    assert done.rollout.hints == {} and done.samples == []


def test_weights_follow_the_kind_of_error():
    config = HintsConfig(weights={"argument_name": 0.25}, max_turns=2)
    [done] = attached(stage(config), play("tiny", "Add 1 and 2.", [WRONG, OTHER, LAST]))
    assert [made.weight for made in done.samples[0].distillations] == [1.0, 0.25]


def test_a_kind_with_weight_0_is_counted_and_not_distilled():
    # It would stand in the denominator and take a teacher document for nothing; nor is a model asked for its hint.
    config = HintsConfig(weights={"argument_name": 0.0})
    [done] = attached(stage(config), play("tiny", "Add 1 and 2.", [WRONG, OTHER, LAST]))
    assert [made.error for made in done.samples[0].distillations] == ["tool_not_found"]
    assert done.rollout.hints["skipped/no_weight"] == 1 and done.rollout.hints["found"] == 2


def test_weights_name_kinds_that_there_are():
    # A misspelt kind would leave its turns at weight 1; a kind of the user's own templates is known.
    with pytest.raises(ConfigError, match=r"weights names \['argument_nme'\].*did you mean argument_name\?"):
        check_kinds(HintsConfig(weights={"argument_nme": 0.5}), TEMPLATES)
    every = ["lint", "tool_error", "bad_json", "argument_type", "tool_not_found", "exception", "failed"]
    check_kinds(
        HintsConfig(weights=dict.fromkeys(every, 0.5)), Templates.load([{"kind": "lint", "hint": "Mind the linter."}])
    )


def test_a_turn_without_tokens_is_counted():
    played = play("tiny", "Add.", [WRONG, LAST])
    sample = msgspec.structs.replace(played.samples[0], turns=[])
    [done] = attached(stage(), PlayedRollout(played.rollout, [sample], []))
    assert done.rollout.hints["skipped/empty_mask"] == 1


# -- layers ----------------------------------------------------------------------------------------------------------


def test_the_first_layer_that_has_a_hint_wins():
    # No template for a burning disk, so the raw error speaks; for a missing tool the template does.
    burning = Step("x", "the disk\nis on fire", error=True)
    [done] = attached(
        stage(layers={"template": TEMPLATES.hint, "raw_error": raw_error}), play("tiny", "Add.", [burning, WRONG, LAST])
    )
    hints = [turn.hint for turn in done.rollout.turns if turn.hint]
    assert hints == ["Reminder: The next step can lead to this error: the disk is on fire", TOOL_HINT]
    assert (done.rollout.hints["layer/raw_error"], done.rollout.hints["layer/template"]) == (1, 1)


def test_a_successful_sibling_shows_how():
    # Its good calls and its answer; not its own, and not one of a rollout that failed. Two failed rollouts are shown
    # different ones.
    good = play("tiny", "Add.", [WRONG, GOOD, LAST], rollout_id="g000003-1", reward=1.0)
    bad = play("tiny", "Add.", [WRONG, Step("9")])
    done = attached(stage(layers={"sibling": sibling_demonstration}), bad, good)
    assert done[0].rollout.turns[1].hint == 'Reminder: This worked before: add {"a": 1, "b": 2}; then 3'
    assert done[1].rollout.hints["skipped/no_hint"] == 1
    other = play("tiny", "Add.", [Step("7")], rollout_id="g000003-2", reward=0.5)
    worse = play("tiny", "Add.", [WRONG, Step("8")], rollout_id="g000003-3", reward=0.4)
    worse = dataclasses.replace(worse, rollout=msgspec.structs.replace(worse.rollout, sibling=3))
    done = attached(stage(layers={"sibling": sibling_demonstration}), bad, good, other, worse)
    assert done[0].rollout.turns[1].hint.endswith("then 3") and done[3].rollout.turns[1].hint.endswith("before: 7")
    assert done[1].rollout.turns[1].hint.endswith("before: 7")


def test_a_long_hint_is_cut_at_a_word():
    config = HintsConfig(max_hint_chars=24)
    [done] = attached(stage(config), play("tiny", "Add.", [WRONG, LAST]))
    assert done.rollout.turns[1].hint == "Reminder: Available..."


# -- models ----------------------------------------------------------------------------------------------------------


async def _with_peer(mode: str, build, answer=lambda body: "use add", **settings):
    async with chat_peer(mode, answer) as peer:
        with tempfile.TemporaryDirectory() as folder:
            endpoint = ChatEndpoint(peer.config(**settings), Path(folder))
            made = build(endpoint)
            played = play("tiny", "Add 1 and 2.", [WRONG, LAST])
            [(rollout, samples)] = await made.attach([(played.rollout, played.samples)])
            await made.close()
            return rollout, samples, peer


def test_a_model_writes_the_hint_from_conversation_turn_and_error():
    rollout, samples, peer = asyncio.run(
        _with_peer(
            "answer", lambda e: stage(layers={"llm": partial(model_hint, e)}, endpoint=e), lambda body: " use\n add "
        )
    )
    assert rollout.turns[1].hint == "use add" and samples[0].distillations
    asked = peer.bodies[0]["messages"][1]["content"]
    assert "Add 1 and 2." in asked and "calls plus {}" in asked and "Tool not found: plus" in asked


@pytest.mark.parametrize(
    ("mode", "settings", "count"),
    [
        ("silent", {"timeout_s": 0.2}, "failed/llm"),
        ("500", {}, "failed/llm"),
        ("nonsense", {}, "failed/llm"),
        ("answer", {"budget_usd": 0.0, "input_usd_per_mtok": 1.0}, "over_budget"),
    ],
)
def test_a_bad_hint_writer_costs_its_hint_only(mode, settings, count):
    # The next layer is tried, and the rollout keeps its sample. The peer answers from the same event loop.
    build = lambda e: stage(layers={"llm": partial(model_hint, e), "template": TEMPLATES.hint}, endpoint=e)
    rollout, samples, _ = asyncio.run(_with_peer(mode, build, **settings))
    assert rollout.hints[count] == 1 and rollout.hints["layer/template"] == 1
    assert rollout.turns[1].hint == TOOL_HINT and samples[0].distillations
    assert rollout.reward == 0.0


def test_a_group_waits_for_its_hints_so_long_and_no_longer(monkeypatch):
    # A writer is silent past the stage's own limit, not its own: the turn is late, and the rollout goes on.
    monkeypatch.setattr("orchestrator.hints.stage._GROUP_TIMEOUT_S", 0.3)
    build = lambda e: stage(layers={"llm": partial(model_hint, e)}, endpoint=e)
    rollout, samples, _ = asyncio.run(_with_peer("silent", build, timeout_s=30.0))
    assert rollout.hints["skipped/late"] == 1 and not samples[0].distillations
    assert rollout.turns[1].error == "tool_not_found" and rollout.turns[1].hint is None


class LongTurns:
    def __init__(self, most: int) -> None:
        self._most = most

    async def __call__(self, rollout: FinishedRollout) -> list[ErrorTurn]:
        return [
            error_turn(rollout, index, "too_long", "The turn was too long.")
            for index, turn in enumerate(rollout.turns)
            if turn.turn is not None and len(turn.text) > self._most
        ]


class Reminder:
    def __init__(self, text: str = "Be brief.") -> None:
        self._text = text

    async def __call__(self, request: HintRequest) -> str | None:
        return self._text if request.error.kind == "too_long" else None


class Texts:
    async def __call__(self, rollout: FinishedRollout) -> list[Any]:
        return ["too long"]


# A detector that gives something else costs its own finds only.
def test_a_detector_that_gives_no_error_turns():
    made = stage(
        detectors={"texts": Texts(), "rules": partial(asyncio.to_thread, find_errors, TEMPLATES, {"tool_error"})}
    )
    (done,) = attached(made, play("tiny", "Add 1 and 2.", [GOOD, WRONG, OTHER, LAST]))
    assert done.rollout.hints["failed/texts"] == 1 and done.rollout.hints["found"] == 2


# A detector and a writer from outside are named by import path, with settings.
def test_own_parts():
    detect = [{"name": "test_stage:LongTurns", "settings": {"most": 0}}]
    layers = ["test_stage:Reminder"]
    config = HintsConfig.model_validate({"detect": detect, "layers": layers})
    made = stage(
        HintsConfig(),
        detectors=own_parts(config.detect, "orchestrator.hints.detect"),
        layers=own_parts(config.layers, "orchestrator.hints.layers"),
    )
    (ended,) = attached(made, play("tiny", "Add 1 and 2.", [LAST]))
    assert [turn.hint for turn in ended.rollout.turns if turn.error == "too_long"] == ["Be brief."]
    for wrong in ({"detect": ["tool_err"]}, {"layers": [{"name": "template", "settings": {"a": 1}}]}):
        with pytest.raises(ValueError, match=r"orchestrator\.hints"):
            HintsConfig.model_validate(wrong)


@pytest.mark.parametrize("mode", ["other_error", "other_episode"])
def test_the_control_arm_gives_hints_that_belong_elsewhere(mode):
    # Whatever a wrong turn gets, it is not its own hint, and it came from another kind of error or another task.
    steps = [WRONG, OTHER, LAST]
    rollouts = [play("tiny", "Add.", steps, rollout_id=f"g00000{n}-0", task_id=f"t{n}") for n in range(4)]
    done = attached(stage(layers={"wrong": WrongHints(mode, seed=3)}), *rollouts)
    right = {"tool_not_found": TOOL_HINT, "argument_name": ARGUMENT_HINT}
    given = [(turn.error, turn.hint) for each in done for turn in each.rollout.turns if turn.hint]
    assert given and all(hint != right[kind] for kind, hint in given)
    assert sum(each.rollout.hints.get("skipped/no_hint", 0) for each in done) >= 1
    with pytest.raises(ConfigError, match="mode"):
        WrongHints("none")


# -- groups without advantage ----------------------------------------------------------------------------------------


def finished(
    *rewards: float, cut: tuple[int, ...] = (), on_side: int | None = None, route: str = "add", **settings: Any
) -> FinishedGroup:
    """A group whose first rollout has a hinted turn; those in `cut` ended at a limit, `on_side` is all side calls."""
    rollouts = [
        play("tiny", "Add.", [WRONG, LAST] if n == 0 else [LAST], rollout_id=f"g000003-{n}", reward=reward)
        for n, reward in enumerate(rewards)
    ]
    done = attached(stage(), *rollouts)
    config = OrchestratorConfig.model_validate(
        {"source": [{"name": "s", "taskset": {"id": "x"}}], "hints": {}} | settings
    )
    ended = [
        (
            msgspec.structs.replace(
                each.rollout,
                truncated=number in cut,
                turns=[msgspec.structs.replace(turn, on_side=number == on_side) for turn in each.rollout.turns],
            ),
            each.samples,
        )
        for number, each in enumerate(done)
    ]
    return score_group(PLAN, ended, config, ChannelsConfig(sdpo={"route": route}))


def test_a_group_without_advantage_still_serves_channel_2():
    # All failed: the policy loss has nothing to learn and counts none of its tokens; the wrong turn is distilled.
    group = finished(0.0, 0.0)
    assert group.outcome is GroupOutcome.DISTILLED
    [sample] = group.samples
    assert sample.distillations and not flags(sample.loss_mask).any() and not floats(sample.advantages).any()
    [turn] = sample.distillations
    assert floats(sample.logprobs)[turn.start : turn.end].all(), "is_clip weighs these tokens too"
    counted = totals(group.samples)
    assert (counted.samples, counted.tokens, counted.distilled_turns) == (0, 0, 1)


def test_a_group_with_advantage_is_ready():
    ready = finished(0.0, 1.0)
    assert ready.outcome is GroupOutcome.READY and len(ready.samples) == 2


def test_routed_rollouts_have_no_policy_loss():
    # A failed rollout with a hint keeps its mask, and so its place in the denominators, with advantage 0; a failed one
    # without a hint and a solved one keep theirs.
    group = finished(0.0, 1.0, 0.0, route="failed")
    hinted, *others = group.samples
    assert hinted.distillations and hinted.num_trained > 0 and not floats(hinted.advantages).any()
    assert all(floats(sample.advantages).any() and not sample.distillations for sample in others)
    assert group.rollouts[0].advantage < 0 and floats(finished(1.0, 0.0, route="failed").samples[0].advantages).any()


def test_rollouts_that_were_cut_short_may_be_left_out_of_channel_1():
    # They still count for the advantages of their siblings, and their hinted turns for SDPO; by default they are
    # trained like all others.
    group = finished(0.0, 1.0, 0.0, cut=(0, 2), train_truncated=False)
    hinted, whole = group.samples
    assert group.outcome is GroupOutcome.READY and group.rollouts[1].advantage == pytest.approx(2 / 3)
    assert hinted.distillations and hinted.num_trained == 0 and whole.num_trained > 0
    assert floats(whole.advantages).max() == pytest.approx(2 / 3)
    assert (totals(group.samples).samples, totals(group.samples).distilled_turns) == (1, 1)
    assert all(sample.num_trained for sample in finished(0.0, 1.0, cut=(0,)).samples)


def test_calls_on_the_side_are_trained_on_demand_only():
    # The rollout still counts for the advantages of its siblings.
    assert [sample.num_trained > 0 for sample in finished(0.0, 1.0, 0.0, on_side=1).samples] == [True, True]
    assert len(finished(0.0, 1.0, 0.0, on_side=1, train_side_calls=True).samples) == 3


def test_a_group_of_rollouts_that_were_cut_short_is_one_without_advantage():
    # Its rewards differ, and yet there is nothing for the policy loss: no place of a batch is filled with it.
    cut = {"cut": (0, 1), "train_truncated": False}
    assert finished(0.0, 1.0, **cut).outcome is GroupOutcome.DISTILLED


# A kind without a licence gets its hint, for the log and for redraws, and is not distilled.
def test_a_kind_without_a_licence_is_not_distilled():
    made = stage(weight_of=lambda kind: float(kind == "argument_name"))
    [done] = attached(made, play("tiny", "Add 1 and 2.", [WRONG, OTHER, LAST]))
    assert [turn.error for turn in done.samples[0].distillations] == ["argument_name"]
    assert done.rollout.hints["hinted"] == 2
