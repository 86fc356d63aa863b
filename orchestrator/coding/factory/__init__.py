"""Make coding tasks from a repository that has tests: `composer tasks make SOURCE -o tasks/`.

source.py      a folder or a git repository -> a clean tree on disk; its functions, and edits of them
suite.py       runs tests of a tree in a box (suite_program.py is what runs inside); three runs of the untouched tree
candidates.py  what could become a task: deletions, mutations, commits
factory.py     all of it for each source: parallel jobs, proofs, the words of a task, report
"""
