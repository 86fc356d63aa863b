"""Replay: what other models would have done at a recorded state, and the preference pairs that follow.

    states -> replay.py -> teachers.py (never of the state's own family) -> composer_prime/llm (budget, cache, client)
                 |             votes, cheapest first, until the majority is settled or a further one is not worth it
                 `-> voting.py -> records.py: pairs.jsonl, and votes.jsonl with the votes behind every pair

Read `replay.py` first. costs.jsonl has a line before and after each call.
"""
