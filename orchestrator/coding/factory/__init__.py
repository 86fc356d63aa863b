"""Make coding tasks from a repository that has tests: `composer tasks make SOURCE -o tasks/`.

source.py      a folder or a git repository -> a clean tree on disk
suite.py       runs tests of a tree in a box; suite_program.py is what runs inside
baseline.py    three runs of the untouched tree: which tests are stable, which functions each test reaches
source_functions.py  the functions of a tree, and how a body is removed
mutations.py   one small change to a function
history.py     commits that changed sources and tests
candidates.py  what could become a task: deletions, mutations, commits
proof.py       runs a candidate's tests before and after; the reason where it is refused
building.py    a proof becomes a task, with the words that ask for it
factory.py     all of it for each source: parallel jobs, report
"""
