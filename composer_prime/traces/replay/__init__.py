"""Teachers: what other models would have done at a recorded state, and the preference pairs that follow.

    states -> replay.py -> families (never its own) -> voi.py -> pool.py -> budget.py -> cache.py | endpoint
                 |                                       votes, cheapest first, until the majority is settled
                 `-> consensus.py -> pairs.jsonl         votes.jsonl says how every pair came to be

Read `replay.py` first. Money: `budget.py` reserves before each call; `costs.jsonl` has a line for each.
"""
