"""tool_loop: the harness that plays a conversation in this process and runs the task's tools here."""

from orchestrator.environments.tool_loop.harness import ToolLoop

__all__ = ["ToolLoop"]
