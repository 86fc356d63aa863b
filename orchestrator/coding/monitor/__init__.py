"""The monitor: did a rollout earn its reward, or find a way around the task?

    seal (before.py) ──> agent plays ──> inspect (after.py) ──> HackVerdict (verdict.py) ──> reward
      unwanted files       tool calls      code, calls              policy of the source
      lures

It checks what grading cannot: how the agent made the patch, and code that works only for the tests
(docs/explanation/hack-monitor.md).
"""
