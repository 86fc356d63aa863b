"""Coding: tasks from repositories, sandboxes to play them in, grading, and the hack monitor.

    task.py      the format of coding tasks
    sandbox/     boxes: isolation and limits
    code/        the task set: tools, grading
    monitor/     hacks: how a rollout earned its reward
    formats/     task files in forms that others publish
    factory/     tasks made of repositories; `git_command.py` serves it and formats/

Configurations name the task sets by import path. Other parts of the product use `sandbox/runtime.py` only.
"""
