"""Make coding tasks from a repository that has tests: `composer tasks make SOURCE -o tasks/`.

source.py      a folder or a git repository -> a clean tree on disk; commits that changed sources and tests
suite.py       runs tests of a tree in a box (suite_program.py is what runs inside); three runs of the untouched tree
functions.py   the functions of a tree, and the edits that remove a body or make one mistake
candidates.py  what could become a task: deletions, mutations, commits
proof.py       runs a candidate's tests before and after; a proof becomes a task, with the words that ask for it
factory.py     all of it for each source: parallel jobs, report
"""
