"""The monitor: whether a rollout earned its reward, or found a way around the task.

    seal (before.py) ──> agent plays, Watch (during.py) ──> inspect (after.py) ──> HackVerdict (verdict.py) ──> reward
      unwanted files        tool calls, file events           files, code, constants      policy of the source
      lures, hashes                                           └─ judge.py, where one is configured

Grading is the first defense: it takes only source files into a pristine tree. The monitor sees what grading cannot: how
the patch came about, and code that is right for the tests alone. Read after.py first.
"""

from orchestrator.environments.code.monitor.after import inspect
from orchestrator.environments.code.monitor.before import Seal, seal
from orchestrator.environments.code.monitor.during import ToolUse, Watch, host_folder, tool_use
from orchestrator.environments.code.monitor.verdict import HackFinding, HackMonitorConfig, HackVerdict

__all__ = [
    "HackFinding",
    "HackMonitorConfig",
    "HackVerdict",
    "Seal",
    "ToolUse",
    "Watch",
    "host_folder",
    "inspect",
    "seal",
    "tool_use",
]
