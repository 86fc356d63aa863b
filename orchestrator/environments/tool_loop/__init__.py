"""tool_loop: the harness that plays a conversation in this process and runs the task's tools here.

The plugin class is imported on first use.
"""

from orchestrator.environments import on_first_use

__all__ = ["ToolLoop"]

__getattr__ = on_first_use(__name__, "harness")
