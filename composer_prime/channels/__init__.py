"""The loss: additive channels, each a pure function of tensors and configuration.

Read total.py first (the sum), then policy.py (channel 1) and corrections.py (off-policy corrections).
"""
