"""Which renderer a model folder gets, and that the one for plain chat templates is fit to train on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_made import CHATML, write_tokenizer

from composer_prime.errors import ConfigError, ModelNotFoundError
from orchestrator.chat_renderer import ChatTemplateRenderer, build_renderer, published_name, read_tokenizer, unread_call
from orchestrator.chat_template import chat_folder

TINY = Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy"
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def test_the_tiny_policy_brings_its_renderer() -> None:
    """A renderer.json in the model folder is obeyed, and its prompts are those of the folder's chat template."""
    config, renderer = build_renderer(str(TINY), None)
    assert config.name == "custom"
    assert type(renderer).__name__ == "ToolQwen3Renderer"
    messages = [{"role": "user", "content": "3 plus 4?"}]
    expected = read_tokenizer(str(TINY)).apply_chat_template(
        messages, tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert renderer.render_ids(messages, tools=[TOOL], add_generation_prompt=True) == list(expected)


def test_a_model_folder_brings_no_code(tmp_path: Path) -> None:
    """A renderer.json that names a file, or a module that is not ours, is refused."""
    write_tokenizer(tmp_path)
    for path in ("evil.Renderer", "orchestrator/../evil.py:Renderer", "./orchestrator.py:Renderer"):
        (tmp_path / "renderer.json").write_text(json.dumps({"name": "custom", "import_path": path}))
        with pytest.raises(ConfigError, match="may only name orchestrator's own"):
            build_renderer(str(tmp_path), None)


def test_the_configuration_wins(model_path: str) -> None:
    """An explicit renderer is taken; one that does not exist is named together with those that do."""
    config, _ = build_renderer(model_path, {"name": "default", "reasoning_parser": "think"})
    assert config.name == "default"
    with pytest.raises(ConfigError, match=r"'qwen33'.*qwen3"):
        build_renderer(model_path, "qwen33")


def test_folders_that_cannot_work_say_why(tmp_path: Path) -> None:
    """No tokenizer, or a tokenizer without chat template."""
    with pytest.raises(ModelNotFoundError, match=r"tokenizer_config\.json"):
        build_renderer(str(tmp_path), None)
    write_tokenizer(tmp_path, template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        build_renderer(str(tmp_path), None)


def test_an_architecture_alone_does_not_choose(tmp_path: Path) -> None:
    """A Qwen3 model with another chat template is rendered with that template, not with Qwen3's."""
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    _, renderer = build_renderer(str(tmp_path), None)
    assert type(renderer) is ChatTemplateRenderer


def test_a_cache_folder_tells_the_published_name(tmp_path: Path) -> None:
    """A snapshot in a Hugging Face cache is the model that the cache folder says."""
    folder = tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    assert published_name(str(folder)) == "Qwen/Qwen3-8B"


def test_missing_content_renders_as_empty(model_path: str) -> None:
    """A template that cannot print None renders an assistant turn without content as an empty one."""
    _, renderer = build_renderer(model_path, None)
    user = {"role": "user", "content": "hi"}
    missing, empty = ({"role": "assistant", "content": content} for content in (None, ""))
    assert renderer.render_ids([user, missing, user]) == renderer.render_ids([user, empty, user])


@settings(max_examples=40, deadline=None)
@given(question=st.text(), answer=st.text(), follow_ups=st.lists(st.text(), min_size=1, max_size=3), cut=st.booleans())
def test_the_bridge_agrees_with_the_template(
    model_path: str, question: str, answer: str, follow_ups: list[str], cut: bool
) -> None:
    """For a completion in its canonical tokens the extended prompt is what the template gives for the whole
    conversation, also when the completion was cut before its end-of-turn token."""
    _, renderer = build_renderer(model_path, None)
    tokenizer = read_tokenizer(model_path)
    first = [{"role": "user", "content": question}]
    prompt = renderer.render_ids(first, add_generation_prompt=True)
    completion = tokenizer.encode(answer, add_special_tokens=False) + ([] if cut else [tokenizer.eos_token_id])
    following = [{"role": "user", "content": text} for text in follow_ups]
    bridged = renderer.bridge_to_next_turn(prompt, completion, following)
    whole = [*first, {"role": "assistant", "content": answer}, *following]
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(completion)] == prompt + completion
    assert bridged.token_ids == renderer.render_ids(whole, add_generation_prompt=True)
    assert len(bridged.message_indices) == len(bridged.token_ids)


def test_a_template_that_rewrites_history_is_not_bridged(tmp_path: Path) -> None:
    """Where the template shows an earlier answer otherwise than it was written, the conversation is rendered anew."""
    write_tokenizer(tmp_path, CHATML.replace("m['content']", "m['content'].split('</think>')[-1]"))
    _, renderer = build_renderer(str(tmp_path), None)
    prompt = renderer.render_ids([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert renderer.bridge_to_next_turn(prompt, [5, 2], [{"role": "user", "content": "b"}]) is None


def test_tool_calls_are_read_from_tagged_text(tmp_path: Path) -> None:
    """Well-formed calls become tool calls; broken ones stay in the content, where the tool loop answers them."""
    write_tokenizer(tmp_path, TOOL_TEMPLATE)
    _, renderer = build_renderer(str(tmp_path), None)
    tokenizer = read_tokenizer(str(tmp_path))
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    bad = "<tool_call>{oops}</tool_call>"

    def parse(text: str) -> tuple[str, list[tuple[str | None, object]]]:
        parsed = renderer.parse_response(tokenizer.encode(text), tools=[TOOL])
        return parsed.content, [(call.name, call.arguments) for call in parsed.tool_calls]

    assert renderer.supports_tools
    assert parse("so " + good) == ("so ", [("add", {"a": 1})])
    assert parse(good + bad) == (bad, [("add", {"a": 1})])
    assert parse("no " + bad) == ("no " + bad, [])


@pytest.mark.slow
def test_tokenizers_read_without_torch_agree_with_autotokenizer(model_path: str) -> None:
    """The direct way to the tokenizer gives the ids of the official, much slower one."""
    from transformers import AutoTokenizer

    for folder in (model_path, str(TINY)):
        ours, theirs = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        text = "<|im_start|>user\nWas kostet 12 + 7? é漢\n<|im_end|>"
        assert ours.encode(text) == theirs.encode(text)
        assert (ours.eos_token_id, ours.chat_template) == (theirs.eos_token_id, theirs.chat_template)


XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
WITH_CALLS = TOOL_TEMPLATE + "{% for m in messages %}{% for c in m.tool_calls or [] %}NOTATION{% endfor %}{% endfor %}"


def test_a_template_that_writes_other_calls_is_found_out(tmp_path: Path) -> None:
    """A call in XML could not be read back; one in JSON is, and a template without calls has none to read."""
    for name, notation in (
        ("xml", XML_CALL),
        ("json", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        ("none", ""),
        ("odd", "{{ c.function.arguments + 1 }}"),  # Cannot be rendered: a rollout tells.
    ):
        (folder := tmp_path / name).mkdir()
        write_tokenizer(folder, WITH_CALLS.replace("NOTATION", notation))
        written = unread_call(build_renderer(str(folder), None)[1])
        assert (written is not None) == (name == "xml")


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "default"])
def test_a_named_renderer_keeps_broken_calls_visible(tmp_path: Path, name: str) -> None:
    """What a stock renderer cannot read stays in the content, where the tool loop answers it."""
    tokenizer = read_tokenizer(str(write_tokenizer(tmp_path, TOOL_TEMPLATE)))
    marks = [f"<{slash}{mark}>" for mark in ("tool_call", "tool_response", "think") for slash in ("", "/")]
    tokenizer.add_tokens([*marks, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    tokenizer.save_pretrained(tmp_path)
    choice = {"name": "default", "tool_parser": "qwen3"} if name == "default" else name
    _, renderer = build_renderer(str(tmp_path), choice)
    text = 'I try. <tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>'
    parsed = renderer.parse_response(tokenizer.encode(text), tools=[TOOL])
    assert parsed.tool_calls == [] and text in parsed.content


def test_a_chosen_chat_template_counts(tmp_path: Path) -> None:
    """model.chat_template decides over the renderer that the model's folder names."""
    template = tmp_path / "own.jinja"
    template.write_text("{{ 'only: ' + messages[-1]['content'] }}")
    _, renderer = build_renderer(str(chat_folder(TINY, template, tmp_path)), None)
    ids = renderer.render_ids([{"role": "user", "content": "plus"}])
    assert read_tokenizer(str(TINY)).decode(ids) == "only: plus"


def test_a_template_that_disagrees_with_its_folder_is_refused(tmp_path: Path) -> None:
    """Someone edited the template of a folder whose renderer.json renders otherwise, or one that cannot be rendered."""
    model = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"renderer\.json"):
        build_renderer(str(model), None)
    (model / "renderer.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        build_renderer(str(model), None)
