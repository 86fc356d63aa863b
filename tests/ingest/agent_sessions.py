"""Synthetic sessions of further agents, each in the form that its program writes."""

from __future__ import annotations

from typing import Any

from ingest_traces import text


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
