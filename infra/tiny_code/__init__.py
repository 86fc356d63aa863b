"""Make the tiny model of configs/code: a policy for the micro_code environment, and preference pairs of its teachers.

    python -m infra.tiny_code.make        trains and measures, and writes composer_prime/assets/tiny_code

Read make.py first. vocabulary.py makes the tokenizer, demonstrate.py the conversations to imitate, play.py measures in
a sandbox. Renderer, training loop and sampling are those of infra/tiny_models.
"""
