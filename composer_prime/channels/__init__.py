"""The loss: the sum of its terms, each in one file. Read term.py first, then total.py (the sum) and policy.py."""
