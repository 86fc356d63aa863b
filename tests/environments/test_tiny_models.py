"""Claims about the shipped tiny models: they load, they are small, and their prompts extend token by token."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import create_renderer
from renderers.configs import CustomRendererConfig
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_prime.data.pairs import EMBEDDED_PAIRS
from composer_prime.traces.records import StateRecord, read_pairs
from infra.tiny_models.pairs import Answer, Conversation, VotedState, call_fails, record_of
from infra.tiny_models.play import draw_episodes
from orchestrator.environments.toolsmith.taskset import generate, run_call

TINY = Path(__file__).parents[2] / "composer_prime/assets/tiny"
NAMES = ("policy", "teacher_a", "teacher_b", "teacher_c")
TOKENIZER = AutoTokenizer.from_pretrained(TINY / "policy")
RENDERER = create_renderer(
    TOKENIZER, CustomRendererConfig.model_validate(json.loads((TINY / "policy/renderer.json").read_text()))
)

texts = st.text(max_size=20)
calls = st.builds(
    lambda name, arguments: {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}},
    st.text("abcxyz_", min_size=1, max_size=6),
    st.dictionaries(st.text("abcxyz", min_size=1, max_size=4), st.one_of(st.integers(), texts), max_size=2),
)
steps = st.lists(st.tuples(st.lists(calls, min_size=1, max_size=2), texts), max_size=3)


def conversation(question: str, turns: list[Any]) -> list[dict[str, Any]]:
    """Messages: a question, then calls and tool replies."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for made, reply in turns:
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
        messages += [{"role": "tool", "tool_call_id": "c", "content": reply} for _ in made]
    return messages


@pytest.mark.parametrize("name", NAMES)
def test_a_model_loads_and_is_small(name):
    # Each folder is in Hugging Face format, Qwen3 architecture, 1.5 to 3 million parameters, under 5 MB.
    model = AutoModelForCausalLM.from_pretrained(TINY / name)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 1.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 3e6
    assert len(TOKENIZER) <= model.config.vocab_size
    assert sum(file.stat().st_size for file in (TINY / name).iterdir()) < 5e6


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_models_share_one_tokenizer(name):
    # Teachers read the policy's token ids, so their vocabularies and templates are the same.
    for file in ("tokenizer.json", "chat_template.jinja", "renderer.json"):
        assert (TINY / name / file).read_bytes() == (TINY / "policy" / file).read_bytes()


@settings(deadline=None, max_examples=50)
@given(texts, steps, st.booleans(), st.booleans())
def test_the_renderer_and_the_chat_template_agree(question, turns, with_tools, ask):
    # Rendering a conversation gives the ids of the shipped chat template; so does the stock qwen3 renderer's prompt.
    messages = conversation(question, turns)
    tools = [tool.schema() for tool in generate(seed=1, difficulty=1, split="train").tools] if with_tools else None
    ids = RENDERER.render(messages, tools=tools, add_generation_prompt=ask).token_ids
    assert ids == TOKENIZER.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, return_dict=False)
    assert ids == Qwen3Renderer(TOKENIZER).render(messages, tools=tools, add_generation_prompt=ask).token_ids


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**53), st.integers(1, 3))
def test_every_turn_extends_the_one_before(seed, difficulty):
    # Bridged prompts are the previous prompt and completion, id by id, then new ids; and equal a fresh rendering.
    episode = generate(seed=seed, difficulty=difficulty, split="train")
    tools = [tool.schema() for tool in episode.tools]
    messages: list[dict[str, Any]] = [{"role": "user", "content": episode.question}]
    prompt = RENDERER.render(messages, tools=tools, add_generation_prompt=True).token_ids
    for step in episode.steps:
        tool = episode.tool_for(step.operation)
        body = json.dumps({"name": tool.name, "arguments": tool.encode(step.operands)})
        text = f"<tool_call>\n{body}\n</tool_call><|im_end|>"
        completion = TOKENIZER.encode(text, add_special_tokens=False)
        (call,) = RENDERER.parse_response(completion).tool_calls
        reply = run_call(episode, call.name, json.dumps(call.arguments))
        assert reply == str(step.result)
        tail = [{"role": "tool", "tool_call_id": "c", "content": reply}]
        bridged = RENDERER.bridge_to_next_turn(prompt, completion, tail, tools=tools).token_ids
        assert bridged[: len(prompt) + len(completion)] == prompt + completion
        function = {"name": call.name, "arguments": call.arguments}
        messages += [{"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}, *tail]
        assert bridged == RENDERER.render(messages, tools=tools, add_generation_prompt=True).token_ids
        prompt = bridged
    assert len(prompt) <= 320


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "plus", "arguments": {"x": 1}\n</tool_call>',
        'First. <tool_call>\n{"name": "plus"',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
        "<tool_call>" + "[" * 2000 + "</tool_call>",
        '<tool_call>{"name": "x", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    ],
)
def test_a_call_that_cannot_be_run_stays_in_the_content(text):
    # Nothing is dropped: the text of a broken call is the content, whatever is wrong with it.
    parsed = RENDERER.parse_response(TOKENIZER.encode(text + "<|im_end|>", add_special_tokens=False))
    assert parsed.tool_calls == []
    assert parsed.content == text


def test_good_calls_beside_a_broken_one_are_kept():
    # The call that can be run is run, and the broken one is still visible.
    good = '<tool_call>\n{"name": "plus", "arguments": {"x": 1}}\n</tool_call>'
    ids = TOKENIZER.encode(good + "\n<tool_call>\n{\n</tool_call><|im_end|>", add_special_tokens=False)
    parsed = RENDERER.parse_response(ids)
    assert [call.name for call in parsed.tool_calls] == ["plus"]
    assert parsed.content == "<tool_call>\n{\n</tool_call>"


def test_votes_become_a_record_of_the_replay():
    # The votes beside the tiny pairs are read by the report as those of a replay are.
    own, other = (Answer(message={"content": text}, canonical=text, token_ids=(1,)) for text in ("4", "5"))
    state = VotedState(trace="toolsmith-0001", turn=2, messages=[], tools=[], prompt=[1])
    votes = {"teacher_a": own, "teacher_b": other, "teacher_c": None}
    record = record_of(state, "no majority", own, votes, None, base="tiny")
    assert msgspec.json.decode(msgspec.json.encode(record), type=StateRecord) == record
    assert (record.state, record.outcome) == ("toolsmith-0001/0002", "no_majority")
    assert [(vote.teacher, vote.agrees) for vote in record.votes] == [("teacher_a", True), ("teacher_b", False)]


# No shipped pair teaches a call that fails: each chosen call runs without an error in the episode of its trace.
def test_the_chosen_calls_of_shipped_pairs_run():
    episodes = draw_episodes(256, seed=7)
    pairs = list(read_pairs(EMBEDDED_PAIRS["tiny"]))
    for pair in pairs:
        number = int(pair.trace.removeprefix("toolsmith-"))
        assert pair.state.messages[0]["content"] == episodes[number].question
        conversation = Conversation(number=number, episode=episodes[number], messages=[], prompt=[])
        assert not call_fails(conversation, pair.chosen)
    assert len(pairs) == 270
