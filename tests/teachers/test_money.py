"""Prices, the cost ledger and the cache."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from composer_prime.config.load import resolve
from composer_prime.config.teachers import TeacherConfig
from composer_prime.errors import ConfigError, LedgerError, UnwritableError
from composer_prime.llm.cache import AnswerCache, CachedAnswer, Question
from composer_prime.llm.reply import Usage
from composer_prime.run.costs import read_costs, spent, write_cost
from composer_prime.traces.replay.replay import parse_arguments
from composer_prime.traces.replay.teacher_pool import price_of


def answered(content: str) -> CachedAnswer:
    return CachedAnswer(
        message={"role": "assistant", "content": content},
        finish_reason="stop",
        input_tokens=1,
        output_tokens=1,
        cost_usd=0.1,
        seconds=0.2,
    )


def teacher(**values) -> TeacherConfig:
    return TeacherConfig(**({"name": "t", "model": "anthropic/claude-sonnet-4"} | values))


# genai-prices knows OpenRouter's models; a configured price wins; a local model is free; an unknown one is refused.
def test_prices() -> None:
    listed = price_of(teacher())
    assert 0 < listed.input_usd < listed.output_usd < 1e-3
    own = price_of(teacher(input_usd_per_mtok=2.0, output_usd_per_mtok=8.0))
    assert own.cost_usd(1_000_000, 500_000) == pytest.approx(6.0)
    assert price_of(teacher(model="tiny/teacher_a", local=True)).cost_usd(10**6, 10**6) == 0
    with pytest.raises(ConfigError, match="set input_usd_per_mtok"):
        price_of(teacher(model="claude-nobody-knows-this", base_url="http://127.0.0.1:9/v1", api_key_var="K"))
    with pytest.raises(ValidationError, match=r"base_url = 'http://127.0.0.1:9/v1' and no api_key_var"):
        teacher(base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ValidationError, match="set both"):
        teacher(input_usd_per_mtok=2.0)


# Where a price rises with the prompt, a call costs what a prompt of its length costs; its bound is at the dearest tier.
def test_tiers() -> None:
    price = price_of(teacher(model="google/gemini-2.5-pro"))
    assert price.cost_usd(10_000, 1_000) == pytest.approx(10_000 * 1.25e-6 + 1_000 * 10e-6)
    assert price.cost_usd(300_000, 1_000) == pytest.approx(0.75 + 0.015) == price.bound_usd(300_000, 1_000)
    assert price.bound_usd(10_000, 1_000) == pytest.approx(10_000 * 2.5e-6 + 1_000 * 15e-6)


# The shipped pools name four families, those of the plan among them, and each of their teachers has a listed price.
@pytest.mark.parametrize("pool", ["openrouter", "openai"])
def test_shipped_pools(pool: str) -> None:
    configs = Path(__file__).parents[2] / "configs"
    teachers = resolve(["@", str(configs / "a1.toml"), "@", str(configs / "teachers" / f"{pool}.toml")]).teachers
    named = {each.known_family: each.model for each in teachers.teacher}
    assert named.keys() == {"claude", "gpt", "deepseek", "gemini"}
    assert "opus" in named["claude"] and "gpt-5" in named["gpt"] and "v4-pro" in named["deepseek"]
    longest = 50_000
    for each in teachers.teacher:
        price = price_of(each)
        assert price.tiers is not None and 0 < price.input_usd < price.output_usd
        bound = price.bound_usd(longest, teachers.max_tokens)
        assert 20 * bound < teachers.budget.usd_per_run


# The command at the top of a pool's file is for real sessions: the run that it names holds 10,000 tokens and more.
@pytest.mark.parametrize("pool", ["openai", "openrouter"])
def test_the_run_that_a_pool_names(pool: str) -> None:
    path = Path("configs/teachers") / f"{pool}.toml"
    head = path.read_text().split("\n\n")[0].replace("\\\n#", "")
    (command,) = [line for line in head.splitlines() if "composer replay" in line and " -o " in line]
    config = parse_arguments(command.split("composer replay ")[1].split())[2]
    assert config.model.max_context >= 10_000 and config.trainer.micro_batch_tokens >= 2 * config.model.max_context
    assert len(config.teachers.teacher) == 4


# Prompt tokens that an endpoint had cached cost what the list says of them; a configured price has no other for them.
def test_cached_prompt_tokens() -> None:
    price = price_of(teacher())
    assert price.cost_usd(10_000, 0, 8_000) == pytest.approx(2_000 * 3e-6 + 8_000 * 0.3e-6)
    assert price.cost_usd(10_000, 0, 20_000) == pytest.approx(10_000 * 0.3e-6)
    own = price_of(teacher(input_usd_per_mtok=2.0, output_usd_per_mtok=8.0))
    assert own.cost_usd(10_000, 0, 8_000) == own.cost_usd(10_000, 0)
    for said, cached in (
        ({"prompt_tokens_details": {"cached_tokens": 7}}, 7),
        ({"prompt_cache_hit_tokens": 7}, 7),
        ({"prompt_tokens_details": {"cached_tokens": 7.0}}, 7),
        ({"prompt_tokens_details": {"cached_tokens": 0.0}}, 0),
        ({"prompt_tokens_details": []}, 0),
        ({"prompt_tokens_details": {"cached_tokens": "7"}}, 0),
    ):
        assert msgspec.convert({"prompt_tokens": 9, "completion_tokens": 1, **said}, Usage).cached_tokens == cached


# What a call costs whatever its length (perplexity's search) is in its bound too.
@pytest.mark.parametrize("model", ["sonar", "sonar-pro", "sonar-reasoning-pro"])
def test_a_fee_for_each_call(model: str) -> None:
    price = price_of(teacher(model=model, base_url="https://api.perplexity.ai", api_key_var="K", family="perplexity"))
    assert 0.01 < price.cost_usd(1, 1) < price.bound_usd(2, 2)
    assert price.cost_usd(0, 0) == pytest.approx(price.bound_usd(0, 0))


# A settlement replaces its reservation; one without settlement stays spent; a torn line harms no other.
def test_the_ledger_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    write_cost(path, "reserved", call="a", state="s", teacher="x", usd=1.0)
    write_cost(path, "settled", call="a", teacher="x", usd=0.25, status="ok")
    write_cost(path, "reserved", call="b", state="s", teacher="x", usd=0.5)
    path.write_bytes(path.read_bytes() + b'{"kind": "sett')
    write_cost(path, "stopped", reason="test")
    total = spent(path)
    assert (total.usd, total.calls, total.unsettled) == (0.75, 2, 1)
    assert [line["kind"] for line in read_costs(path)] == ["reserved", "settled", "reserved", "stopped"]


# The key depends on everything an answer depends on, and on nothing else; a damaged answer is a miss.
def test_the_cache(tmp_path: Path) -> None:
    base = {"endpoint": "e", "model": "m", "messages": [{"role": "user", "content": "x"}], "tools": []}
    question = Question(**base, temperature=0.0, max_tokens=9)
    reordered = Question(**{**base, "messages": [{"content": "x", "role": "user"}]}, temperature=0.0, max_tokens=9)
    assert question.key == reordered.key
    changes = (
        {"endpoint": "f"},
        {"model": "n"},
        {"messages": []},
        {"tools": [{}]},
        {"temperature": 1.0},
        {"max_tokens": 8},
    )
    keys = {Question(**({**base, "temperature": 0.0, "max_tokens": 9} | change)).key for change in changes}
    assert len(keys | {question.key}) == 7
    cache = AnswerCache(tmp_path / "answers.sqlite")
    answer = answered("y")
    assert cache.get(question.key) is None
    cache.put(question.key, answer)
    assert cache.get(question.key) == AnswerCache(tmp_path / "answers.sqlite").get(question.key) == answer
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as database, database:
        database.execute("UPDATE answers SET answer = ?", (b"{",))
    assert cache.get(question.key) is None


# A file that is no cache is left as it is, and the message names it.
def test_a_foreign_file_is_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_bytes(b"Dear reader, " * 1000)
    with pytest.raises(UnwritableError, match=r"answers\.sqlite"):
        AnswerCache(path)
    assert path.read_bytes() == b"Dear reader, " * 1000


# Of two processes that make the file at once, the second waits for the first.
def test_a_file_that_another_process_makes(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    opened: list[AnswerCache] = []
    other = threading.Thread(target=lambda: opened.append(AnswerCache(path)))
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as database:
        database.execute("BEGIN IMMEDIATE")
        other.start()
        other.join(0.1)
        database.execute("COMMIT")
    other.join()
    assert opened and opened[0].get("aa11") is None


# A damaged file is an OSError that names it, not an error of SQLite.
def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    with closing(AnswerCache(path)) as cache:
        cache.put("aa11", answered("y"))
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with closing(AnswerCache(path)) as cache, pytest.raises(OSError, match=r"answers\.sqlite"):
        cache.get("aa11")


GOOD = '{"kind": "reserved", "call": "a", "usd": 2, "trace": "t"}\n'
WRONG = {
    '{"kind": "settled", "usd": 1}': "call is None, expected text",
    '{"kind": "settled", "call": "a"}': "usd is None, expected a number of at least 0",
    '{"kind": "settled", "call": "a", "usd": NaN}': "usd is nan",
    '{"kind": "settled", "call": "a", "usd": -3}': "usd is -3",
    '{"kind": "settled", "call": "a", "usd": ' + "9" * 400 + "}": "usd is 9999",
    '{"kind": "reserved", "call": ["a"], "usd": 1}': "call is .'a'.",
    '{"kind": "seconds", "seconds": 3}': "gpu_seconds is None",
}


# The message names file, line, what is wrong and what to do; a sum that leaves the line out would pass a cap.
@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text(GOOD + line + "\n")
    with pytest.raises(LedgerError, match=rf"costs.jsonl:2 is not a ledger line \({WRONG[line]}.*: correct the line"):
        spent(path)


# What is no JSON, as a crash leaves it, or of a kind that is not known, is passed over.
def test_other_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "costs.jsonl"
    path.write_text('{"kind": "settl\n[1]\n{"kind": "stopped"}\n{"kind": 3}\n{}\n' + GOOD)
    assert (spent(path).usd, spent(path).unsettled) == (2, 1)
