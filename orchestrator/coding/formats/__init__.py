"""Task files in forms that others publish: SWE-bench's family, HumanEval, GSM8K, Harbor.

    questions.py   GSM8K and any file of questions with a final answer: one turn, no box
    programs.py    HumanEval: a function to write, graded by tests in a box
    conversion.py  reads files; HumanEval and the issues of SWE-bench, Lite, Verified, SWE-Gym, SWE-smith become tasks
    harbor.py      Harbor task folders: instruction, tests/test.sh, reward file

A module with a task set is a plugin id: `orchestrator.coding.formats.questions`.
"""
