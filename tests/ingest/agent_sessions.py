"""Synthetic sessions of further agents, each in the form that its program writes."""

from __future__ import annotations

from typing import Any

from ingest_traces import text, use


def codex(kind: str, **payload: Any) -> dict[str, Any]:
    """A line of a rollout of Codex CLI."""
    return {"timestamp": "2026-01-02T03:04:05.678Z", "type": kind, "payload": payload}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return codex("response_item", type=kind, **fields)


def said(role: str, words: str) -> dict[str, Any]:
    block = {"type": "output_text" if role == "assistant" else "input_text", "text": words}
    return item("message", role=role, content=[block])


CODEX = [
    codex("session_meta", id="0197-a", cwd="/home/me/x", cli_version="0.6", base_instructions={"text": "Be Codex."}),
    said("developer", "Sandbox: workspace-write."),
    said("user", "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"),
    codex("event_msg", type="task_started", turn_id="1"),
    codex("turn_context", turn_id="1", cwd="/x", model="gpt-5-codex", approval_policy="never", summary="auto"),
    said("user", "Fix the test."),
    codex("event_msg", type="user_message", message="Fix the test.", images=[]),
    item("reasoning", summary=[{"type": "summary_text", "text": "Look first."}], encrypted_content="gAAA"),
    said("assistant", "I look."),
    item("function_call", name="shell", arguments='{"command": ["ls"]}', call_id="call_1"),
    item("custom_tool_call", name="apply_patch", input="*** Begin Patch\n*** End Patch", call_id="call_2"),
    codex("event_msg", type="token_count", info=None),
    item("function_call_output", call_id="call_1", output="Exit code: 0\nWall time: 0.1 seconds\nOutput:\na.py"),
    item("custom_tool_call_output", call_id="call_2", output="Exit code: 1\nWall time: 0 seconds\nOutput:\nno hunk"),
    item("local_shell_call", call_id="call_3", status="completed", action={"type": "exec", "command": ["pytest"]}),
    item("function_call_output", call_id="call_3", output='{"output":"1 failed","metadata":{"exit_code":1}}'),
    item("web_search_call", id="ws_1", status="completed", action={"type": "search", "query": "pytest"}),
    item("ghost_snapshot", ghost_commit={}),
    said("assistant", "Done."),
]

ATIF = {
    "schema_version": "ATIF-v1.6",
    "session_id": "trial-1",
    "agent": {"name": "claude-code", "version": "2.0", "model_name": "claude-sonnet-4"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "Be brief."},
        {
            "step_id": 2,
            "source": "user",
            "message": [text("Count the files."), {"type": "image", "source": {"path": "a"}}],
        },
        {"step_id": 3, "source": "agent", "message": "I look.", "reasoning_content": "hm"},
        {
            "step_id": 4,
            "source": "agent",
            "message": "Executed Bash toolu_1",
            "tool_calls": [{"tool_call_id": "toolu_1", "function_name": "Bash", "arguments": {"command": "ls x"}}],
            "observation": {
                "results": [{"source_call_id": "toolu_1", "content": "no x\n\n[error] tool reported failure"}]
            },
        },
        {
            "step_id": 5,
            "source": "agent",
            "message": "",
            "model_name": "claude-opus-4",
            "tool_calls": [
                {"tool_call_id": "k1", "function_name": "keys", "arguments": {"keystrokes": "ls\n"}},
                {"tool_call_id": "k2", "function_name": "keys", "arguments": {"keystrokes": "pwd\n"}},
            ],
            "observation": {"results": [{"content": "a.py\n/x"}]},
        },
        {"step_id": 6, "source": "agent", "message": "One.", "llm_call_count": 1, "extra": {"is_sidechain": False}},
    ],
    "final_metrics": {"total_steps": 6},
}

ADP = {
    "id": "set_1",
    "content": [
        {"class_": "text_observation", "content": "Count the files.", "name": None, "source": "user"},
        {"class_": "message_action", "content": "I look.", "description": None},
        {"class_": "code_action", "language": "bash", "content": "ls x", "description": "List x."},
        {"class_": "text_observation", "content": "Error: no x", "name": None, "source": "environment"},
        {"class_": "api_action", "function": "open", "kwargs": {"path": "a.py"}, "reasoning_content": "hm"},
        {"class_": "web_observation", "url": "http://a", "axtree": "button 'b'", "html": None, "viewport_size": None},
        {"class_": "api_action", "function": "finish", "kwargs": {"message": "One."}, "description": None},
    ],
    "details": {},
}


def stream(kind: str, **fields: Any) -> dict[str, Any]:
    """A line of `claude -p --output-format stream-json`."""
    return {"type": kind, "session_id": "s-1", "uuid": f"u-{len(str(fields))}", "parent_tool_use_id": None, **fields}


def spoken(message_id: str, *blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    message = {"id": message_id, "type": "message", "role": "assistant", "model": "claude-sonnet-4-5"}
    return stream("assistant", message={**message, "content": list(blocks), "stop_reason": None}, **fields)


def returned(call_id: str, words: str, error: bool = False, **fields: Any) -> dict[str, Any]:
    block = {"tool_use_id": call_id, "type": "tool_result", "content": words, "is_error": error}
    return stream("user", message={"role": "user", "content": [block]}, **fields)


CLAUDE_STREAM = [
    stream("system", subtype="init", cwd="/x", tools=["Bash", "Read", "Task"], model="claude-sonnet-4-5"),
    spoken("m1", {"type": "thinking", "thinking": "hm", "signature": "x"}),
    spoken("m1", text("I look.")),
    spoken("m1", use("t1", "Bash", command="ls")),
    spoken("m1", use("t2", "Task", prompt="count")),
    spoken("m9", text("Counting."), parent_tool_use_id="t2"),
    returned("t1", "a.py"),
    returned("t2", "failed", error=True),
    spoken("m2", use("t3", "Read", file_path="a.py")),
    returned("t3", "x = 1"),
    stream("result", subtype="success", is_error=False, result="One.", num_turns=3, total_cost_usd=0.01),
]


def gemini(message_id: str, kind: str, content: Any, **fields: Any) -> dict[str, Any]:
    """A message of a session of Gemini CLI."""
    return {"id": message_id, "timestamp": "2026-01-02T03:04:05.678Z", "type": kind, "content": content, **fields}


def gemini_call(call_id: str, name: str, status: str, response: dict[str, Any], **args: Any) -> dict[str, Any]:
    result = [{"functionResponse": {"id": call_id, "name": name, "response": response}}]
    return {"id": call_id, "name": name, "args": args, "status": status, "result": result, "timestamp": "t"}


_LISTED = gemini_call("g1", "list_directory", "success", {"output": "a.py"}, path="x")
_FAILED = gemini_call("g2", "read_file", "error", {"error": "File not found"}, file_path="b.py")
_ANSWER = {"thoughts": [{"subject": "Plan", "description": "look", "timestamp": "t"}], "model": "gemini-2.5-pro"}
GEMINI = [
    {"sessionId": "g-1", "projectHash": "abc", "startTime": "t", "lastUpdated": "t", "kind": "main"},
    gemini("1", "user", [{"text": "Count the files."}]),
    {"$set": {"lastUpdated": "t"}},
    gemini("2", "gemini", "I look.", **_ANSWER, tokens=None),
    gemini("2", "gemini", "I look.", **_ANSWER, toolCalls=[_LISTED, _FAILED]),
    gemini("3", "user", [*_LISTED["result"], *_FAILED["result"]]),
    gemini("4", "info", "Update available"),
    gemini("5", "gemini", "One.", model="gemini-2.5-flash", thoughts=[]),
]
GEMINI_DOCUMENT = {**GEMINI[0], "messages": [GEMINI[1], *GEMINI[4:]]}
_READ = {"id": "g2", "name": "read_file"}
GEMINI_CHECKPOINT = {
    "history": [
        {"role": "user", "parts": [{"text": "Count the files."}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "I look."}]},
        {
            "role": "model",
            "parts": [{"functionCall": {"id": "g2", "name": "read_file", "args": {"file_path": "b.py"}}}],
        },
        {"role": "user", "parts": _FAILED["result"]},
        {"role": "model", "parts": [{"text": "One."}]},
    ]
}
GEMINI_STREAM = [
    {"type": "init", "timestamp": "t", "session_id": "g-2", "model": "gemini-2.5-pro"},
    {"type": "message", "timestamp": "t", "role": "user", "content": "Count the files."},
    {"type": "message", "timestamp": "t", "role": "assistant", "content": "I lo", "delta": True},
    {"type": "message", "timestamp": "t", "role": "assistant", "content": "ok.", "delta": True},
    {
        "type": "tool_use",
        "timestamp": "t",
        "tool_name": "read_file",
        "tool_id": "g2",
        "parameters": {"file_path": "b.py"},
    },
    {"type": "tool_result", "timestamp": "t", "tool_id": "g2", "status": "error", "output": "File not found"},
    {"type": "message", "timestamp": "t", "role": "assistant", "content": "One.", "delta": True},
    {"type": "result", "timestamp": "t", "status": "success", "stats": {}},
]

_SURROUNDINGS = text("<environment_details>\nopen tabs\n</environment_details>")
CLINE = [
    {"role": "user", "content": [text("<task>\nCount the files.\n</task>"), _SURROUNDINGS]},
    {
        "role": "assistant",
        "content": [
            text(
                "<thinking>\nI look.\n</thinking>\n\n<execute_command>\n<command>ls x &&\npwd</command>\n"
                "<requires_approval>false</requires_approval>\n</execute_command>"
            )
        ],
        "modelInfo": {"modelId": "claude-sonnet-4", "providerId": "anthropic", "mode": "act"},
    },
    {
        "role": "user",
        "content": [
            text("[execute_command for 'ls x &&\npwd'] Result:"),
            text("The tool execution failed with the following error:\n<error>\nno x\n</error>"),
            _SURROUNDINGS,
        ],
    },
    {
        "role": "assistant",
        "content": "<write_to_file>\n<path>a.html</path>\n<content>\n<p>see <content></content></p>\n</content>\n"
        "</write_to_file>",
    },
    {"role": "user", "content": [text("[write_to_file for 'a.html'] Result:\nsaved"), _SURROUNDINGS]},
    {"role": "assistant", "content": [text("<attempt_completion>\n<result>\nOne.\n</result>\n")]},
]
"""The last call is cut off."""

AIDER = """
# aider chat started at 2026-01-02 03:04:05

> Aider v0.80.0  
> Main model: gpt-4o with diff edit format  
> Git repo: .git with 3 files  

#### /add a.py  
> Added a.py to the chat  

#### Set x to 2.  
#### Keep y.  

I change it.

a.py
```python
# the answer
> quoted
<<<<<<< SEARCH
x = 1
=======
x = 2
>>>>>>> REPLACE
```

> Tokens: 2k sent, 100 received.  
> The LLM did not conform to the edit format.  
> # 1 SEARCH/REPLACE block failed to match!  

I try again.

> Applied edit to a.py  
> Commit 1a2b3c4 Set x  

#### /run pytest  

# aider chat started at 2026-01-03 03:04:05

> Model: claude-3-5-sonnet with whole edit format  

#### /ask What is x?  

x is 2.
"""
