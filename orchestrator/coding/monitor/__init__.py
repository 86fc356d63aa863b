"""The monitor: did a rollout earn its reward, or find a way around the task?

    seal (before.py) ──> agent plays ──> inspect (after.py) ──> HackVerdict (verdict.py) ──> reward
      unwanted files       tool calls      code, calls              policy of the source
      lures

The monitor checks what grading cannot: how the agent made the patch, and code that works only for the tests.
"""

from orchestrator.coding.monitor.after import inspect
from orchestrator.coding.monitor.before import Seal, seal
from orchestrator.coding.monitor.commands import ToolUse, tool_use
from orchestrator.coding.monitor.verdict import HackFinding, HackMonitorConfig, HackVerdict

__all__ = ["HackFinding", "HackMonitorConfig", "HackVerdict", "Seal", "ToolUse", "inspect", "seal", "tool_use"]
