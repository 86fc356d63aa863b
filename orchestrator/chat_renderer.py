"""Choose the renderer that turns a model folder's conversations into token ids.

Imports renderers: the orchestrator imports this only inside threads. chat_template.py has what is light.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jinja2
import pydantic
from renderers import RendererConfig, create_renderer
from renderers.base import (
    MODEL_RENDERER_MAP,
    Message,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    Renderer,
    ToolCallParseStatus,
    ToolSpec,
    extract_message_tool_names,
    load_tokenizer,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import DefaultRendererConfig, Qwen3RendererConfig
from renderers.default import DefaultRenderer, _decode_tool_call_arguments
from renderers.qwen3 import Qwen3Renderer

from composer_prime.errors import ConfigError, ModelNotFoundError
from composer_prime.llm.reply import TOOL_CALL, read_tool_call
from orchestrator.chat_template import RENDER_ERRORS

logger = logging.getLogger(__name__)

_OURS = re.compile(r"orchestrator(\.\w+)+")
_RUNNABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
"""The tool loop answers an unknown name."""
_PROBES: list[list[Message]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hello."},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "Again, please."},
    ],
]
_PROBE_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def build_renderer(model_path: str, choice: str | dict[str, Any] | None) -> tuple[RendererConfig, Renderer]:
    """Return configuration and renderer of a model folder. The first of these decides:

    1. `choice`, a renderer's name or configuration;
    2. the folder's renderer.json, which may only name ours: a model must not bring code;
    3. the folder's published name in renderers' own map;
    4. a renderer for its architecture, if it renders like the folder's chat template, token for token;
    5. the folder's chat template itself (`ChatTemplateRenderer`).

    Raises ModelNotFoundError without a tokenizer, ConfigError where none of these fits.
    """
    tokenizer = read_tokenizer(model_path)
    config = _choose(model_path, tokenizer, choice)
    try:
        renderer = create_renderer(tokenizer, config)
        renderer.render_ids(_PROBES[0], add_generation_prompt=True)
    except Exception as error:
        raise ConfigError(
            f"renderer {config.name!r} does not fit the model folder {model_path}: {type(error).__name__}: {error}; "
            "repair its chat template, set model.chat_template, or name another in model.renderer"
        ) from error
    if config.name != "custom":
        stock = type(renderer)
        renderer.__class__ = type(stock.__name__, (VisibleCalls, stock), {})
    return config, renderer


def unread_call(renderer: Renderer) -> str | None:
    """Return a tool call as the chat template writes it, where it could not be read."""
    if not isinstance(renderer, ChatTemplateRenderer) or renderer._tool_parser is not None:
        return None  # The others read what they write.
    name, tools = _PROBE_TOOL["function"]["name"], [_PROBE_TOOL]
    call: Any = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        written = renderer._text([*_PROBES[0], answer], tools)[len(renderer._text(_PROBES[0], tools)) :]
    except RENDER_ERRORS:
        return None  # A rollout with tools names what the template lacks.
    return None if name not in written or any(map(_read_call, TOOL_CALL.findall(written))) else written


async def prompt_parts(
    count: Callable[[list[Any], list[Any]], Awaitable[int]], messages: list[dict[str, Any]], tools: list[Any]
) -> str:
    """Say how many tokens of a prompt its parts have; `count` renders messages and tools. It ends another sentence."""
    others = [message for message in messages if message["role"] != "system"]
    try:
        whole, bare, history = await count(messages, tools), await count(messages, []), await count(others, [])
    except Exception:
        return ""  # Not every template takes a part.
    return f"; its tokens are {bare - history} of system, {whole - bare} of tools, {history} of history"


def _choose(model_path: str, tokenizer: Any, choice: str | dict[str, Any] | None) -> RendererConfig:
    if choice not in (None, "auto"):
        return _explicit(choice)
    folders_choice = _read_json(Path(model_path) / "renderer.json")
    if folders_choice:
        path = folders_choice.get("import_path")
        if path is not None and not _OURS.fullmatch(str(path)):
            raise ConfigError(
                f"{model_path}/renderer.json names {path}: a model folder may only name orchestrator's own"
            )
        config = _explicit(folders_choice)
        if getattr(tokenizer, "chat_template", None) and not _agrees(tokenizer, config):
            raise ConfigError(
                f"{model_path}: its chat template renders otherwise than its renderer.json: remove renderer.json to "
                "use the template, or restore the template"
            )
        return config
    name = MODEL_RENDERER_MAP.get(published_name(model_path) or "") or _by_architecture(model_path, tokenizer)
    if name is not None:
        return _explicit(name)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{model_path} has no chat template: add chat_template.jinja to the folder, set model.chat_template to a "
            "Jinja file, or name a renderer that knows the model in model.renderer"
        )
    return _explicit({"name": "custom", "import_path": "orchestrator.chat_renderer.ChatTemplateRenderer"})


def read_tokenizer(model_path: str) -> Any:
    """Return the tokenizer, without torch if it has a tokenizer.json. Raises ModelNotFoundError."""
    folder = Path(model_path)
    if not (folder / "tokenizer_config.json").exists():
        raise ModelNotFoundError(
            f"{model_path} holds no tokenizer_config.json: give the folder of a Hugging Face model"
        )
    if not (folder / "tokenizer.json").exists() or "auto_map" in _read_json(folder / "tokenizer_config.json"):
        return load_tokenizer(model_path)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(model_path)


def published_name(model_path: str) -> str | None:
    """Return `org/name`, if known."""
    folder = Path(model_path)
    for parent in folder.resolve().parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/", 1)
    name = _read_json(folder / "config.json").get("_name_or_path")
    return name if name in MODEL_RENDERER_MAP else None


def _explicit(choice: str | dict[str, Any] | None) -> RendererConfig:
    try:
        settings = {"name": choice} if isinstance(choice, str) else choice
        return pydantic.TypeAdapter(RendererConfig).validate_python(settings)
    except (pydantic.ValidationError, ValueError, KeyError) as error:
        names = ", ".join(sorted(set(MODEL_RENDERER_MAP.values())))
        message = f"renderer {choice!r} is not one of renderers' own ({names}, default, custom): {error}"
        raise ConfigError(message) from error


def _by_architecture(model_path: str, tokenizer: Any) -> str | None:
    """Return a renderer that agrees with the folder's template on every probe."""
    model_type = str(_read_json(Path(model_path) / "config.json").get("model_type") or "")
    name = "qwen3" if model_type in ("qwen3", "qwen3_moe") else None
    if name is None or not getattr(tokenizer, "chat_template", None):
        return None
    return name if _agrees(tokenizer, _explicit(name)) else None


def _agrees(tokenizer: Any, config: RendererConfig) -> bool:
    try:
        renderer = create_renderer(tokenizer, config)
        return all(
            renderer.render_ids(probe, tools=tools, add_generation_prompt=True)
            == list(tokenizer.apply_chat_template(probe, tools=tools, add_generation_prompt=True, return_dict=False))
            for probe in _PROBES
            for tools in (None, [_PROBE_TOOL])
        )
    except Exception as error:
        logger.info("renderer %s does not fit the chat template: %s", config.name, error)
        return False


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


class ChatTemplateRenderer(DefaultRenderer):
    """renderers' DefaultRenderer, for any folder with a chat template, with three differences:

    1. A message without content renders as an empty one; SmolLM2's own template cannot print None.
    2. The next prompt extends the tokens of the last turn, where the template keeps history as it was: tokenizing
       sampled text again could give other ids.
    3. Tool calls written as `<tool_call>{"name": …, "arguments": {…}}</tool_call>` are parsed.
    """

    _tokenizer: Any
    config_class = DefaultRendererConfig
    _MARK = "\u2063<think>\nabc\n</think>\n\nxyz\u2063"

    @property
    def supports_tools(self) -> bool:
        return self._tool_parser is not None or "tools" in (self._tokenizer.chat_template or "")

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        """A malformed call stays in the content."""
        parsed = super().parse_response(token_ids, **options)
        if options.get("tools") and self._tool_parser is None:
            calls = [(block, _read_call(block[1])) for block in TOOL_CALL.finditer(parsed.content)]
            parsed.tool_calls = [call for _, call in calls if call is not None]
            if parsed.tool_calls:
                broken = "".join(block[0] for block, call in calls if call is None)
                parsed.content = TOOL_CALL.sub("", parsed.content) + broken
        return parsed

    def _apply(self, messages: list[Message], **options: Any) -> list[int]:
        return super()._apply([_with_content(message) for message in messages], **options)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """Return previous and new ids; None means render all again."""
        stop = self._tokenizer.eos_token_id
        if stop is None or not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(previous_prompt_ids, previous_completion_ids, {stop}, synthesize_close=stop)
        pieces = self._pieces(new_messages, tools) if previous is not None else None
        if previous is None or pieces is None:
            return None
        ids, owners = list(previous), [-1] * len(previous)
        for index, piece in enumerate(pieces):
            new_ids = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += new_ids
            owners += [index if index < len(new_messages) else -1] * len(new_ids)
        return RenderedTokens(
            token_ids=ids,
            message_indices=owners,
            message_roles=[message.get("role") or "" for message in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _pieces(self, new_messages: list[Message], tools: list[ToolSpec] | None) -> list[str] | None:
        """Return the text after a turn's stop token: of each message, then of the opening; None if not appended."""
        opening: list[Message] = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": self._MARK}]
        messages = opening + [_with_content(message) for message in new_messages]
        try:
            texts = [self._text(messages[: len(opening) + count + 1], tools) for count in range(len(new_messages))]
            texts.append(self._text(messages, tools, add_generation_prompt=True))
        except jinja2.TemplateError:
            return None
        _, mark, tail = texts[0].partition(self._MARK)
        stop = self._tokenizer.eos_token
        if not mark or stop is None or not tail.startswith(stop):
            return None
        pieces = [tail[len(stop) :]]
        for shorter, longer in itertools.pairwise(texts):
            if not longer.startswith(shorter):
                return None
            pieces.append(longer[len(shorter) :])
        return pieces

    def _text(self, messages: list[Message], tools: list[ToolSpec] | None, add_generation_prompt: bool = False) -> str:
        options = {**(self.config.model_extra or {}), "add_generation_prompt": add_generation_prompt}
        messages = _decode_tool_call_arguments(messages)
        return self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)


class VisibleCalls:
    """Mixed into a stock renderer, it leaves a call that cannot be run in the content, as the model wrote it.

    verifiers drops calls without a name. In the content the tool loop can answer them, and they render to the same
    tokens again.
    """

    _tokenizer: Any
    get_stop_token_ids: Any

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        try:
            parsed = super().parse_response(token_ids, **options)  # pyright: ignore[reportAttributeAccessIssue]
        except (ValueError, RecursionError):
            # json.loads fails on absurd numbers and nesting.
            return ParsedResponse(content=self._text(token_ids))
        runnable = [call for call in parsed.tool_calls if _runnable(call)]
        broken = [call for call in parsed.tool_calls if not _runnable(call)]
        if broken and not runnable:
            # The whole reply, white space and all: it must render to the same tokens.
            parsed.content = self._text(token_ids)
        for call in broken if runnable else ():
            start, end = call.token_span or (0, 0)
            parsed.content += self._text(token_ids[start:end]) or call.raw
        parsed.tool_calls = runnable
        return parsed

    def _text(self, token_ids: list[int]) -> str:
        stops = set(self.get_stop_token_ids())
        return self._tokenizer.decode([i for i in token_ids if i not in stops], skip_special_tokens=False)


class ToolQwen3Renderer(VisibleCalls, Qwen3Renderer):
    """For models that never think: no turn gets an empty think block."""

    config_class = Qwen3RendererConfig

    @staticmethod
    def _last_query_index(messages: list[Any]) -> int:
        return len(messages)


def _with_content(message: Message) -> Message:
    return message if message.get("content") is not None else {**message, "content": ""}


def _read_call(text: str) -> ParsedToolCall | None:
    call = read_tool_call(text)
    if call is None or not _encodable(call):
        return None
    return ParsedToolCall(raw=text, name=call[0], arguments=call[1])


def _runnable(call: ParsedToolCall) -> bool:
    return call.status in _RUNNABLE and isinstance(call.name, str) and _encodable([call.name, call.arguments])


def _encodable(call: Any) -> bool:
    """Half a character can be escaped in JSON, and UTF-8 cannot hold it."""
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
