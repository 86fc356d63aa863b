"""Makes the tiny models of the quickstart: one policy and three teachers, all for the toolsmith environment.

    python -m infra.tiny_models.make        trains all four and writes composer_prime/assets/tiny (under 30 minutes)

make.py is the table of contents; tokenizer.py the vocabulary and chat template; demonstrate.py the conversations that
are imitated, with injected mistakes; mixtures.py who learns which mistakes; train.py the supervised loop; play.py and
measure.py how good the result is.
"""
