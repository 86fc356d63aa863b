"""Read tasks of Cline and Roo Code: api_conversation_history.json, one list of Anthropic messages.

1. Without native calls the model writes its calls as XML in its text: `<read_file><path>a.py</path></read_file>`. They
   are read as calls. Their results are texts behind "[read_file for 'a.py'] Result:" in the next message.
2. Roo Code keeps what a condensation replaced, and names the replacing message in `condenseParent`. Its sliding window
   does so with `truncationParent`. Such messages are dropped when the message of that id comes.
3. The file names neither the system prompt nor the tools. A task has its folder's name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from composer_prime.traces.ingest.messages import TraceBuilder, feed, take_message
from composer_prime.traces.ingest.reading import FileStart, objects, string, text_of
from composer_prime.traces.ingest.trace_file import TraceFile
from composer_prime.traces.state import TraceState

NAME, VERSION = "cline", 1
"""Written for Cline 3 and Roo Code 3."""
FILE = "api_conversation_history.json"
_TOOLS = {
    "access_mcp_resource", "apply_diff", "ask_followup_question", "attempt_completion", "browser_action",
    "codebase_search", "condense", "edit_file", "execute_command", "fetch_instructions", "focus_chain",
    "generate_explanation", "insert_content", "list_code_definition_names", "list_files", "load_mcp_documentation",
    "new_rule", "new_task", "plan_mode_respond", "act_mode_respond", "read_file", "replace_in_file", "report_bug",
    "run_slash_command", "search_and_replace", "search_files", "summarize_task", "switch_mode", "update_todo_list",
    "use_mcp_tool", "use_skill", "web_fetch", "web_search", "write_to_file",
}  # fmt: skip
_HEADING = re.compile(r"^\[(?P<tool>[a-z]\w{1,63})(?: for [^\n]*)?\] Result:", re.MULTILINE)
_WHOLE = {"content", "diff"}
"""Parameters that may hold any text, their own closing tag too: the last one in the call ends them."""
_MARKS = (("condenseParent", "condenseId"), ("truncationParent", "truncationId"))


def matches(sample: FileStart) -> bool:
    listed = sample.document
    if not isinstance(listed, list) or not any(_is_message(message) for message in listed[:8]):
        return False
    return sample.path.name == FILE or any("<environment_details>" in _text(message) for message in objects(listed[:8]))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("user", "assistant") and "content" in message


def read(file: TraceFile) -> Iterator[TraceState]:
    if not isinstance(file.whole, list):
        file.unknown()
        return
    listed = file.document()
    named = file.path.resolve().parent.name if file.path.name == FILE else file.path.stem
    task = _Task(listed)
    yield from feed(file, TraceBuilder(file, named), listed, task.take)


class _Task:
    """What is known of the task so far."""

    def __init__(self, listed: list[Any]) -> None:
        headings = (
            _HEADING.finditer(text)
            for message in objects(listed)
            if message.get("role") == "user"
            for block in _blocks(message)
            if (text := text_of(block)).startswith("[") and "] Result:" in text
        )
        self._tools = _TOOLS | {heading["tool"] for found in headings for heading in found}
        self._calls = 0
        self._replaced: dict[str | None, list[str]] = defaultdict(list)
        """Marks of the messages that the message of an id replaces."""

    def take(self, builder: TraceBuilder, message: Any) -> str | None:
        """Process one message. Return why it is skipped; None when it is not."""
        if not isinstance(message, dict):
            return "not an object"
        self._calls += 1
        mark = f"message {self._calls}"
        for parent, own in _MARKS:
            if string(message.get(own)) in self._replaced:
                builder.forget(self._replaced.pop(message[own]), "")
            if isinstance(message.get(parent), str):
                self._replaced[message[parent]].append(mark)
        if message.get("role") == "assistant":
            message = self._with_calls(message)
        return take_message(builder, message, mark)

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the model's message with the calls in its text as blocks. Native calls stay as they are."""
        blocks = _blocks(message)
        if any(block.get("type") == "tool_use" for block in objects(blocks)):
            return message
        text = "\n".join(part for block in blocks if _is_text(block) and (part := text_of(block)))
        said, calls = xml_calls(text, self._tools)
        if not calls:
            return message
        others = [block for block in blocks if not _is_text(block)]
        uses = [
            {"type": "tool_use", "id": f"xml_{self._calls}_{index}", "name": name, "input": arguments}
            for index, (name, arguments) in enumerate(calls)
        ]
        return {**message, "content": [*others, {"type": "text", "text": said}, *uses]}


def xml_calls(text: str, tools: set[str]) -> tuple[str, list[tuple[str, dict[str, str]]]]:
    """Return (the text without its calls, [(tool, arguments)]).

    A call that is cut off is read as far as it goes. A tool that is only named is text.
    """
    said: list[str] = []
    calls: list[tuple[str, dict[str, str]]] = []
    done = 0
    while (opening := _next_opening(text, tools, done)) is not None:
        name = opening["name"]
        closing = f"</{name}>"
        end = _end_of_call(text, opening.end(), closing)
        body = text[opening.end() : end]
        said.append(text[done : opening.start()])
        calls.append((name, _arguments(body)))
        done = min(end + len(closing), len(text))
    said.append(text[done:])
    return "\n".join(part.strip() for part in said if part.strip()), calls


def _next_opening(text: str, tools: set[str], start: int) -> re.Match[str] | None:
    """Return the next opening of a call: a parameter follows it, or its own closing tag where it has none."""
    for tag in _OPENING.finditer(text, start):
        if tag["name"] in tools and (after := _TAG.match(text, tag.end())) is not None:
            begins = after["name"] == tag["name"] if after["closing"] else after["name"] not in tools
            if begins:
                return tag
    return None


_OPENING = re.compile(r"<(?P<name>[a-z]\w{1,63})>")
_TAG = re.compile(r"\s*<(?P<closing>/?)(?P<name>[a-z]\w{1,63})>")


def _end_of_call(text: str, start: int, closing: str) -> int:
    """Return where the closing tag begins; the text's end without one.

    A parameter of any text may hold the call's closing tag, so the parameter's own comes first.
    """
    end = text.find(closing, start)
    long = next((tag for tag in _OPENING.finditer(text, start, max(end, start)) if tag["name"] in _WHOLE), None)
    if long is not None and (ended := text.find(f"</{long['name']}>", long.end())) >= 0:
        end = text.find(closing, ended)
    return len(text) if end < 0 else end


def _arguments(body: str) -> dict[str, str]:
    """Return the parameters of a call. A long one ends with its last closing tag, one that is cut off with the text."""
    arguments: dict[str, str] = {}
    at = 0
    while (tag := _OPENING.search(body, at)) is not None:
        name, closing = tag["name"], f"</{tag['name']}>"
        end = body.rfind(closing, tag.end()) if name in _WHOLE else body.find(closing, tag.end())
        end = len(body) if end < 0 else end
        value = body[tag.end() : end]
        arguments.setdefault(name, value.removeprefix("\n").removesuffix("\n") if name in _WHOLE else value.strip())
        at = end + len(closing)
    return arguments


def _blocks(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": string(content) or ""}]


def _is_text(block: Any) -> bool:
    return isinstance(block, str) or (isinstance(block, dict) and block.get("type") == "text")


def _text(message: dict[str, Any]) -> str:
    return text_of(message.get("content"))
