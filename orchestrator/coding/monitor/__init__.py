"""The monitor: did a rollout earn its reward, or find a way around the task?

`before.py` seals the agent's tree, and `after.py` inspects what is left for what grading cannot see: how the agent made
the patch, and code that works only for the tests (docs/explanation/hack-monitor.md).
"""
