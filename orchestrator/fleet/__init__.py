"""What nodes do and cost, and how an operator sends them away.

accounts.py  what each node did and costs, on disk and after a restart (read first)
control.py   drain, evict and ban in the running orchestrator, and the rule that drains expensive nodes
commands.py  the same from the command line, over loopback
"""
