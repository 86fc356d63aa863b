"""Make the tiny models of the quickstart: one policy and three teachers, all for the toolsmith environment.

    python -m infra.tiny_models.make        trains all four and writes composer_prime/assets/tiny (under 30 minutes)

Read make.py first. tokenizer.py makes the vocabulary and chat template, demonstrate.py the conversations to imitate,
with injected mistakes. mixtures.py says which model learns which mistakes, and train.py has the supervised loop.
play.py tells how good the result is.
"""
