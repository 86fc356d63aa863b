"""The loss: the sum of its terms, each in one file. Read term.py first (a term, and the sum), then policy.py."""
