"""Pairs on their way into a batch: order, cursor, tokens, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_prime.data.pairs import Pair, PairFile, PairState, resolve_pairs
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.packing.pack import pack
from composer_prime.wire.types import TermUnit, flags, ints
from orchestrator.file_rows import PairCursor, PairMixer, RowTokenizer
from tests.chat_models import chat
from tests.rollouts_made import TOOLS

ROOMY = dict(max_context=384, row_tokens=4096)


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": '{"a": 1, "b": 2}'}
    return says("", tool_calls=[{"id": "c", "type": "function", "function": function}])


def pair(number: int = 0, **changes: Any) -> Pair:
    state = PairState(
        state_id=f"t/s{number}", messages=[{"role": "user", "content": f"Add {number} and 2."}], tools=TOOLS
    )
    values = {"trace": "t", "state": state, "chosen": calls("add"), "rejected": calls("plus"), "epsilon": 0.125}
    return Pair(**(values | changes))


def write(path: Path, pairs: list[Pair], *, more: bytes = b"") -> Path:
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(each) + b"\n" for each in pairs) + more)
    return path


def mixer(path: Path, *, per_step: int = 4, seed: int = 0, limits: dict[str, Any] = ROOMY) -> PairMixer:
    return PairMixer(PairFile(path), RowTokenizer(chat("tiny")[0], **limits), per_step=per_step, seed=seed)


def ids(drawn: list[TermUnit]) -> list[str]:
    return [preference.name.split("/")[1] for preference in drawn]


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "smollm2", "qwen3"])
def test_both_sides_are_what_a_rollout_would_hold(model):
    # The common context is a rollout's prompt, token by token; each answer ends with the token that ends a turn.
    renderer, tokenizer = chat(model)
    made = RowTokenizer(renderer, max_context=2000, row_tokens=4096).preference(pair())
    assert isinstance(made, TermUnit)
    prompt = list(renderer.render_ids(pair().state.messages, tools=TOOLS, add_generation_prompt=True))
    chosen, rejected = (ints(side).tolist() for side in made.documents)
    context = len(prompt)
    assert chosen[:context] == rejected[:context] == prompt
    assert [flags(mask).tolist().index(1) for mask in made.masks] == [context, context]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chosen[-1] == rejected[-1] == end and chosen[context:].count(end) == 1
    assert '"add"' in tokenizer.decode(chosen[context:])
    [[row]] = pack([], [made], run_id="r", step=1, world_size=1, max_tokens=4096)
    assert row.units[0].value == 0.125


@pytest.mark.parametrize(
    ("reason", "changes", "limits"),
    [
        ("truncated", {"truncated": True}, ROOMY),
        ("same", {"rejected": calls("add")}, ROOMY),
        ("unrenderable", {"chosen": {"content": "no role"}}, ROOMY),
        ("context_differs", {"chosen": {"role": "user", "content": "hi"}}, ROOMY),
        ("too_long", {}, dict(max_context=20, row_tokens=4096)),
        ("row_full", {}, dict(max_context=384, row_tokens=80)),
    ],
)
def test_a_pair_that_cannot_be_trained_is_refused_with_its_reason(reason, changes, limits):
    assert RowTokenizer(chat("tiny")[0], **limits).preference(pair(**changes)) == reason


# -- order -----------------------------------------------------------------------------------------------------------


class Counted:
    """A file of so many pairs, whose text nobody reads."""

    def __init__(self, count: int) -> None:
        self.count, self.path = count, Path("pairs.jsonl")

    def __len__(self) -> int:
        return self.count

    def refresh(self) -> int:
        return self.count

    def digest(self, count: int) -> str:
        return str(count)

    def read(self, index: int) -> int:
        return index

    def preference(self, index: int) -> TermUnit:
        """As a tokenizer: a pair that is named by its number."""
        return TermUnit(term="replay_dpo", name=f"pair t/{index}", documents=[], masks=[])


def drawn(mixing: PairMixer, count: int) -> list[str]:
    return [name for step in range(count) for name in ids(mixing.draw(step))]


def counted(file: Counted, seed: int) -> PairMixer:
    return PairMixer(file, file, per_step=1, seed=seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 5), st.integers(1, 12), st.integers(1, 30), st.integers(0, 8))
def test_a_resumed_order_goes_on_as_if_it_had_not_stopped(seed, size, before, grown):
    # Also when the file grew meanwhile: the pass under way keeps its order.
    file = Counted(size)
    whole, stopped = counted(file, seed), counted(file, seed)
    drawn(whole, before)
    stopped.restore(msgspec.json.decode(msgspec.json.encode(whole.cursor), type=PairCursor))
    file.count += grown
    assert drawn(whole, 30) == drawn(stopped, 30)


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(2, 12))
def test_every_pass_holds_every_pair_once_and_is_shuffled_anew(seed, size):
    mixing = counted(Counted(size), seed)
    passes = [drawn(mixing, size) for _ in range(6)]
    assert all(sorted(one, key=int) == [str(number) for number in range(size)] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


# -- mixing ----------------------------------------------------------------------------------------------------------


def test_a_file_may_grow_while_training(tmp_path):
    # No file, then three pairs, then a fourth and half a line: each pass holds what there was when it began.
    path = tmp_path / "pairs.jsonl"
    mixing = mixer(path, per_step=3)
    assert mixing.draw(1) == [] and mixing.metrics["pairs/in_file"] == 0
    write(path, [pair(n) for n in range(3)])
    assert sorted(ids(mixing.draw(2))) == ["s0", "s1", "s2"]
    write(path, [pair(3)], more=b'{"trace": "torn')
    third = ids(mixing.draw(3))
    assert len(set(third)) == 3 and mixing.cursor.known == 4 and mixing.metrics["pairs/in_file"] == 4
    seen = set(third) | set(ids(mixing.draw(4)))
    assert seen == {"s0", "s1", "s2", "s3"}


def test_refused_pairs_are_counted_and_others_drawn_in_their_place(tmp_path):
    # Of six, one is cut and one is no pair at all; a batch of four is full nevertheless, and never holds a pair twice.
    path = write(tmp_path / "pairs.jsonl", [pair(0, truncated=True), *(pair(n) for n in range(1, 5))], more=b"[]\n")
    mixing = mixer(path)
    for step in range(1, 5):
        assert sorted(ids(mixing.draw(step))) == ["s1", "s2", "s3", "s4"]
    assert mixing.metrics["pairs/refused/truncated"] == mixing.metrics["pairs/refused/no_pair"] == 1
    nothing = mixer(write(tmp_path / "bad.jsonl", [pair(0, truncated=True)]))
    assert nothing.draw(1) == [] and nothing.metrics["pairs/refused"] == 1


def test_a_file_of_refused_pairs_is_told_once(tmp_path, caplog):
    # Else replay-DPO trains nothing and only a metric knows. Told again when the file has grown and it is still so.
    path = write(tmp_path / "bad.jsonl", [pair(n, truncated=True) for n in range(3)])
    mixing = mixer(path)
    for step in range(1, 4):
        mixing.draw(step)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"replay-DPO trains nothing: all 3 pairs of {path} are refused (truncated 3)"]
    write(path, [pair(3, truncated=True)])
    mixing.draw(4)
    assert "all 4 pairs" in caplog.records[-1].getMessage() and len(caplog.records) == 2
    write(path, [pair(4)])
    assert ids(mixing.draw(5)) == ["s4"] and len(caplog.records) == 2


def test_a_resumed_run_has_the_pairs_it_had(tmp_path):
    # As many pairs, but others: their order would be another file's. What was appended since is welcome.
    path = write(tmp_path / "pairs.jsonl", [pair(n) for n in range(5)])
    first = mixer(path)
    first.draw(1)
    cursor = first.cursor
    grown = write(tmp_path / "grown.jsonl", [pair(n) for n in range(8)])
    mixer(grown).restore(cursor)
    other = write(tmp_path / "other.jsonl", [pair(n + 1) for n in range(5)])
    with pytest.raises(CheckpointError, match="does not begin with the 5 pairs of the checkpoint's pass"):
        mixer(other).restore(cursor)


@pytest.mark.parametrize("drawn_before", [0, 1])
def test_a_file_that_disappears_is_named_with_the_remedy(tmp_path, drawn_before):
    path = write(tmp_path / "pairs.jsonl", [pair(n) for n in range(5)])
    file = PairFile(path)
    file.refresh()
    mixing = PairMixer(file, RowTokenizer(chat("tiny")[0], **ROOMY), per_step=2, seed=0)
    for step in range(drawn_before):
        mixing.draw(step)
    path.unlink()
    with pytest.raises(ConfigError, match=r"pairs.jsonl held 5 pairs and is no longer there: put it back"):
        mixing.draw(7)
    with pytest.raises(ConfigError, match="no longer there"):
        file.read(0)


def test_steps_without_weight_draw_nothing(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [pair(n) for n in range(4)])
    tokenizer = RowTokenizer(chat("tiny")[0], **ROOMY)
    mixing = PairMixer(PairFile(path), tokenizer, per_step=2, seed=0, active=lambda step: step > 5)
    assert mixing.draw(5) == [] and mixing.cursor == PairCursor()
    assert len(mixing.draw(6)) == 2


def test_a_wrong_line_is_named(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [pair(0)])
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"epsilon": 0.7}) + "\n")
    file = PairFile(path)
    assert file.refresh() == 2 and file.read(0) == pair(0)
    with pytest.raises(ConfigError, match=r"pairs.jsonl, pair 2: epsilon is 0.7"):
        file.read(1)


def test_the_shipped_pairs_can_all_be_trained():
    # Real votes of the tiny teachers: every pair fits configs/a3.toml's context, none is refused, labels are doubted.
    path = resolve_pairs(Path("tiny"), Path())
    assert path.stat().st_size < 1_000_000
    file, tokenizer = PairFile(path), RowTokenizer(chat("tiny")[0], **ROOMY)
    made = [tokenizer.preference(file.read(index)) for index in range(file.refresh())]
    assert len(made) == 270 and all(isinstance(each, TermUnit) for each in made)
    assert {each.value for each in made} == {0.125, 0.375}
    assert len({each.name for each in made}) == len(made)
