"""Task files in forms that others publish: SWE-bench's family, GSM8K, Harbor.

    questions.py   GSM8K and any file of questions with a final answer: one turn, no box
    conversion.py  reads files; the issues of SWE-bench, Lite, Verified, SWE-Gym and SWE-smith become tasks
    harbor.py      Harbor task folders: instruction, tests/test.sh, reward file

A module with a task set is a plugin id: `orchestrator.coding.formats.questions`.
"""
