"""Channel 3's pairs on their way into a batch: pairs.jsonl -> order -> token ids -> Preference.

Read mixer.py first. How pairs come to be is orchestrator/teachers; what a line of the file holds is
composer_prime/traces/pairs.py.
"""
