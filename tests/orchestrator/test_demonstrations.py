"""Recorded conversations on their way into a step: tokens to imitate, rows of a step, what is refused."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from orch_peers import PeerTrainer, ScriptedPool, make_config

from composer_prime.cli import rollouts_command
from composer_prime.cli.eval_command import evaluation_config
from composer_prime.config.load import dump, resolve
from composer_prime.config.root import Config
from composer_prime.data.conversation_rows import read_rows, rollout_row
from composer_prime.errors import CheckpointError, ConfigError
from composer_prime.run import ledger
from composer_prime.wire.types import StepReply, TermUnit, flags, ints, pack_flags, pack_ints
from orchestrator import file_rows
from orchestrator.chat_renderer import ChatTemplateRenderer
from orchestrator.file_rows import NO_ROWS, DemonstrationRows, RowTokenizer, build_demonstrations, derive_seed
from tests.chat_models import chat
from tests.rollouts_made import TOOLS
from tests.waiting import until

KEY = "orchestrator.demonstrations.files"
SFT = str(Path(__file__).parents[2] / "configs" / "sft.toml")
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Add 1 and 2."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
PLAIN = [TALK[0], *TALK[3:]]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def rows_of(tmp_path: Path, *values: Any):
    return read_rows([write(tmp_path / "rows.jsonl", *values)], KEY)


def tokenizer_of(name: str = "tiny", *, max_context: int = 4096) -> RowTokenizer:
    return RowTokenizer(chat(name)[0], max_context=max_context)


def imitated(name: str, row: TermUnit) -> list[str]:
    """The text of each run of imitated tokens."""
    texts, tokenizer = [], chat(name)[1]
    before = 0
    for token, trained in zip(ints(row.documents[0]), flags(row.masks[0]), strict=True):
        if trained:
            texts += [] if before else [[]]
            texts[-1].append(int(token))
        before = trained
    return [tokenizer.decode(ids) for ids in texts]


@pytest.mark.parametrize("name", ["tiny", "smollm2", "qwen3"])
def test_imitated_are_the_assistants_tokens_and_the_end_of_each_turn(tmp_path, name):
    # Calls, text and the end-of-turn token of all three turns, for a renderer that says what is sampled (tiny, qwen3)
    # and for a bare chat template (smollm2). Openings of turns, users and tools are context.
    # Qwen3's template writes an empty thought into the last answer, which the model would sample, too.
    (row,) = rows_of(tmp_path, {"messages": TALK, "tools": TOOLS} if name != "smollm2" else {"messages": PLAIN})
    texts = imitated(name, tokenizer_of(name).demonstration(row))
    assert texts[-1].endswith("Yes.<|im_end|>") and texts[-2].endswith("It is 3.<|im_end|>")
    if name != "smollm2":
        assert len(texts) == 3 and '"name": "add"' in texts[0] and texts[0].endswith("</tool_call><|im_end|>")


def test_a_turn_is_what_a_rollout_would_sample(tmp_path):
    # Tokens up to a turn are those of the prompt that a rollout samples it after, id by id.
    (row,) = rows_of(tmp_path, {"messages": TALK, "tools": TOOLS})
    row_ids, mask = (lambda each: (list(ints(each.documents[0])), list(flags(each.masks[0]))))(
        tokenizer_of().demonstration(row)
    )
    for index in row.imitated:
        prompt = list(chat("tiny")[0].render_ids(TALK[:index], tools=TOOLS, add_generation_prompt=True))
        assert row_ids[: len(prompt)] == prompt and mask[len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_messages_of_weight_0_are_context(tmp_path):
    # As fine-tuning services have it.
    talk = [TALK[0], {**TALK[3], "weight": 0}, TALK[4], {**TALK[5], "weight": 1}]
    (row,) = rows_of(tmp_path, {"messages": talk})
    assert imitated("tiny", tokenizer_of().demonstration(row)) == ["Yes.<|im_end|>"]


def with_template(template: str) -> RowTokenizer:
    tokenizer = copy.copy(chat("smollm2")[1])
    tokenizer.chat_template = template
    return RowTokenizer(ChatTemplateRenderer(tokenizer), max_context=999)


def test_the_mask_is_that_of_a_template_with_generation_blocks(tmp_path, monkeypatch):
    # transformers' own assistant mask, which TRL's assistant_only_loss reads.
    _, tokenizer = chat("smollm2")
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (row,) = rows_of(tmp_path, {"messages": PLAIN})
    ours = with_template(template).demonstration(row)
    monkeypatch.setattr(tokenizer, "chat_template", template)
    theirs = tokenizer.apply_chat_template(PLAIN, return_assistant_tokens_mask=True, return_dict=True)
    assert list(ints(ours.documents[0])) == theirs["input_ids"]
    assert list(flags(ours.masks[0])) == theirs["assistant_masks"]


def test_a_template_that_rewrites_history_is_refused(tmp_path):
    # What is imitated would not be what the policy reads and writes.
    template = (
        "{% for message in messages %}{% if loop.last or message.role != 'assistant' %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (row,) = rows_of(tmp_path, {"messages": PLAIN})
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the chat template cannot mark .* before message 1"):
        with_template(template).demonstration(row)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages|dictsort }}"])
def test_what_a_template_cannot_render_is_named(tmp_path, template):
    # Its own words, or Python's AttributeError.
    (row,) = rows_of(tmp_path, {"messages": PLAIN})
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the chat template cannot render"):
        with_template(template).demonstration(row)


def test_a_message_that_a_template_drops_is_named(tmp_path):
    # Qwen3's template knows no developer.
    (row,) = rows_of(tmp_path, {"messages": [{"role": "developer", "content": "Be brief."}, *PLAIN]})
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the chat template leaves out message 0, .*'developer'"):
        tokenizer_of("qwen3").demonstration(row)


def test_a_turn_without_a_stop_token_trains_nothing_of_the_next_turns(tmp_path):
    # As in Phi-3's template, turns end with another token, and the stop token comes once, at the very end.
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_end|>{% endif %}"
    )
    (row,) = rows_of(tmp_path, {"messages": PLAIN})
    with pytest.raises(ConfigError, match="no end-of-turn token follows message 1"):
        with_template(template).demonstration(row)


def test_a_row_longer_than_the_context_is_left_out(tmp_path):
    (row,) = rows_of(tmp_path, {"messages": TALK, "tools": TOOLS})
    length = len(ints(tokenizer_of().demonstration(row).documents[0]))
    assert tokenizer_of(max_context=length).demonstration(row) is not None
    assert tokenizer_of(max_context=length - 1).demonstration(row) is None


@pytest.mark.parametrize(
    "lines",
    [
        ["{broken"],
        ["7"],
        [{"prompt": "a", "completion": "b"}],
        [{"messages": []}],
        [{"messages": TALK[:1]}],
        [{"messages": [{**TALK[5], "weight": 0}]}],
        [{"messages": [{"role": "bot", "content": ""}]}],
        [{"messages": TALK, "tools": "add"}],
        [{"messages": [{**TALK[5], "content": {"text": "Yes."}}]}],
        [{"messages": [{**TALK[5], "tool_calls": CALL}]}],
        [{"messages": [{**TALK[5], "tool_calls": [{"function": {}}]}]}],
        [" "],
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, lines):
    with pytest.raises(ConfigError, match="rows.jsonl" if lines == [" "] else "rows.jsonl:1"):
        rows_of(tmp_path, *lines)


def test_a_missing_file_and_one_of_bytes(tmp_path):
    with pytest.raises(ConfigError, match=r"demonstrations.files names .*gone.jsonl, but there is no such file"):
        read_rows([tmp_path / "gone.jsonl"], KEY)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read_rows([tmp_path / "binary"], KEY)


def made(count: int, per_step: int = 4, **more: Any) -> DemonstrationRows:
    ids, mask = pack_ints([1, 2]), pack_flags([0, 1])
    rows = [TermUnit(term="sft", name=f"row f:{number}", documents=[ids], masks=[mask]) for number in range(count)]
    return DemonstrationRows(rows, per_step=per_step, seed=7, **more)


def names(rows: DemonstrationRows, *steps: int) -> list[str]:
    return [row.name for step in steps for row in rows.of_step(step)]


def test_each_pass_has_each_row_once_in_an_order_of_its_own():
    # Ten rows, four a step: three steps a pass, the last with two. The step alone says which rows it has.
    rows = made(10)
    first, second = names(rows, 1, 2, 3), names(rows, 4, 5, 6)
    assert len(rows.of_step(3)) == 2 and sorted(first) == sorted(second) == sorted(f"row f:{n}" for n in range(10))
    assert first != second and names(made(10), 5) == names(rows, 5)
    assert rows.metrics(5) == {
        "sft/rows": 4, "sft/pass": 1, "sft/rows_in_files": 10, "sft/rows_skipped": 0,
    }  # fmt: skip


def test_the_order_of_a_pass_is_drawn_once(monkeypatch):
    # A step is asked for several times, and a pass has many: a shuffle of all rows each time would be felt.
    drawn = []
    monkeypatch.setattr(file_rows, "derive_seed", lambda *words: drawn.append(words) or derive_seed(*words))
    rows = made(10)
    for step in (1, 2, 2, 3, 4):
        rows.metrics(step)
        rows.of_step(step)
    assert [words[-1] for words in drawn] == [0, 1]


def test_an_evaluation_needs_no_rows(tmp_path, monkeypatch):
    # Configurations and run directories of SFT can be evaluated where their files are not.
    monkeypatch.chdir(tmp_path)
    config = evaluation_config(["@", SFT])
    (tmp_path / "config.json").write_text(dump(config))
    assert evaluation_config(["@", str(tmp_path / "config.json")]).run.max_steps == 0
    assert build_demonstrations(config, tmp_path) is NO_ROWS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--channels.sft.weight", "0"], "channels.sft.weight is 0 and .*files names 1 file: SFT needs"),
        (["--channels.sdpo.weight", "1"], "groups_per_step is 0, but channels.sdpo.weight is 1"),
        (["--orchestrator.eval.every_steps", "0"], "eval_files is set, but orchestrator.eval.every_steps is 0"),
        (["--orchestrator.demonstrations.rows_per_step", "0"], "rows_per_step"),
    ],
)
def test_settings_that_contradict_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        resolve(["@", SFT, *words])


def test_a_run_without_sources_needs_no_nodes(tmp_path):
    # Demonstrations alone: no source, no node. Rollouts need a source.
    text = '[run]\nname = "x"\n[model]\npath = "tiny"\n[channels.sft]\nweight = 1.0\n[inference]\nnodes = 0\n'
    (tmp_path / "x.toml").write_text(text)
    words = ["@", str(tmp_path / "x.toml"), "--orchestrator.demonstrations.files", '["rows.jsonl"]']
    alone = ["--orchestrator.groups_per_step", "0"]
    assert resolve([*words, *alone]).orchestrator.source == []
    with pytest.raises(ConfigError, match=r"inference\.nodes is 1, but there is no"):
        resolve([*words, *alone, "--inference.nodes", "1"])
    with pytest.raises(ConfigError, match=r"orchestrator\.source is empty: .*groups_per_step = 0"):
        resolve(words)


def turn(role: str, text: str, parent: int | None, *calls: str) -> dict[str, Any]:
    return dict(role=role, text=text, parent=parent, tool_calls=[{"name": name, "arguments": "{}"} for name in calls])


PLAYED = [turn("user", "Add.", None), turn("assistant", "", 0, "add"), turn("tool", "3", 1), turn("assistant", "3", 2)]


def test_a_rollout_becomes_a_row(tmp_path):
    # What was played and paid: calls with ids, their answers, the tools on offer. It reads back as a row.
    line = rollout_row({"reward": 1.0, "turns": PLAYED, "tools": TOOLS})
    (row,) = rows_of(tmp_path, line)
    assert row.tools == TOOLS and row.imitated == [1, 3]
    assert row.messages[1]["tool_calls"][0]["id"] == row.messages[2]["tool_call_id"] == "call_1_0"
    assert imitated("tiny", tokenizer_of().demonstration(row))[1] == "3<|im_end|>"


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": None},
        {"truncated": True},
        {"turns": PLAYED[:1]},
        {"turns": []},
        {"turns": [*PLAYED, turn("assistant", "again", 0)]},
    ],
)
def test_what_failed_was_cut_short_or_branched_is_no_row(changes):
    assert rollout_row({"reward": 1.0, "turns": PLAYED, **changes}) is None


def test_the_command_writes_the_chosen_rollouts(tmp_path, capsys):
    # Those that pass the filters, whatever --limit; what is no row is counted.
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "config.json").write_text("{}")
    branched = [*PLAYED, turn("user", "x", 0)]
    played = [{"rollout_id": str(n), "reward": n % 2, "turns": PLAYED if n else branched} for n in range(6)]
    write(run / "rollouts" / "step_000001.jsonl", *played, {"rollout_id": "6", "reward": 1.0, "turns": branched})
    words = [str(run), "--min-reward", "1", "--limit", "1", "--messages"]
    assert rollouts_command.main([*words, str(tmp_path / "new" / "good.jsonl")]) == 0
    assert "3 rows in" in (said := capsys.readouterr().out) and "1 rollout branched" in said
    assert len(read_rows([tmp_path / "new" / "good.jsonl"], KEY)) == 3
    with pytest.raises(ConfigError, match="none of 0 chosen rollouts can be a row"):
        rollouts_command.main([str(run), "--min-reward", "2", "--messages", str(tmp_path / "none.jsonl")])
    with pytest.raises(ConfigError, match="cannot be written"):
        rollouts_command.main([*words, str(tmp_path)])


def talking(root: Path, *, resume: bool = False) -> Config:
    """Four steps of three rows from ten, with held-out rows every two steps, and no environment."""
    if not (root / "rows.jsonl").exists():
        talks = [
            [{"role": "user", "content": f"Add {n}."}, {"role": "assistant", "content": str(n)}] for n in range(10)
        ]
        write(root / "rows.jsonl", *({"messages": talk} for talk in talks))
    values = make_config(root, max_steps=4, resume=resume).model_dump()
    files = [str(root / "rows.jsonl")]
    values["orchestrator"] |= {"groups_per_step": 0, "source": [], "eval": {"every_steps": 2}}
    values["orchestrator"]["demonstrations"] = {"files": files, "eval_files": files, "rows_per_step": 3}
    values["channels"]["sft"] = {"weight": 1.0}
    values["inference"]["nodes"] = 0
    return Config.model_validate(values)


async def test_a_trainer_that_attaches_again_gets_no_row_that_it_blamed(open_run, run_dir, tmp_path):
    """The orchestrator that served the row lives on; the step comes again without it."""
    async with open_run(talking(tmp_path), node=False) as run:
        async with run.trainer(0) as first:
            blamed, *rest = served(await first.ask(1, 0))
            ledger.append_step(run_dir.ledger, 1, [], [blamed])
        async with PeerTrainer(run_dir, run.step_endpoint) as second:
            ledger.append_rewind(run_dir.ledger, 0)
            await second.attach(0)
            assert served((await second.train(1))[0]) == rest


async def test_without_rollouts_an_evaluation_is_played_with_its_own_weights(open_run, run_dir, tmp_path):
    """Every step is evaluated, so the batch of each one waits until the last evaluation is over."""
    values = talking(tmp_path).model_dump()
    values["orchestrator"] |= {"source": make_config(tmp_path).model_dump()["orchestrator"]["source"]}
    values["orchestrator"]["eval"]["every_steps"] = 1
    values["inference"]["nodes"] = 1
    pool, over = ScriptedPool(), asyncio.Event()
    pool.gates = {("eval0", 1): over}
    async with open_run(Config.model_validate(values), pool) as run, run.trainer(0) as trainer:
        first = asyncio.create_task(trainer.train(1))
        await until(lambda: any("evaluation of step 0" in said for said in trainer.waits))
        assert not first.done()
        over.set()
        await first
        for step in (2, 3, 4):
            await trainer.train(step)
        await trainer.checkpoint(4)
        await asyncio.wait_for(run.task, 100)
    figures = {line["step"]: line for line in run.lines() if "eval/s/version_min" in line}
    assert [(step, line["eval/s/version_min"], line["eval/s/version_max"]) for step, line in figures.items()] == [
        (step, step, step) for step in range(5)
    ]


def served(reply: StepReply) -> list[str]:
    return sorted(each.name for row in reply.micro_batches for each in row.units)


async def test_a_run_without_rollouts_serves_rows_and_resumes_with_the_next_ones(open_run, run_dir, tmp_path):
    """Steps are conversations alone, held-out ones come where they are due, a resume serves what would have come."""
    async with open_run(talking(tmp_path), node=False) as run, run.trainer(0) as trainer:
        replies = [(await trainer.train(step))[0] for step in (1, 2)]
        assert (await trainer.checkpoint(2)).error is None
        replies += await trainer.train(3)
        assert [len(served(reply)) for reply in replies] == [3, 3, 3]
        assert all(reply.totals.samples == reply.totals.tokens == 0 for reply in replies)
        assert all(reply.totals.unit_tokens["sft"] >= 6 for reply in replies)
        assert [sum(len(row.units) for row in reply.held_out) for reply in replies] == [10, 10, 0]
        assert replies[2].metrics["sft/rows_in_files"] == 10
    async with open_run(talking(tmp_path, resume=True), node=False) as run, run.trainer(2) as trainer:
        again, last = [(await trainer.train(step))[0] for step in (3, 4)]
        assert served(again) == served(replies[2])
        assert len({name for reply in [*replies, last] for name in served(reply)}) == 10
    write(tmp_path / "rows.jsonl", {"messages": TALK})
    async with open_run(talking(tmp_path, resume=True), node=False) as run:
        with pytest.raises(CheckpointError, match="give the run the files it was started with"):
            await asyncio.wait_for(run.task, 100)
