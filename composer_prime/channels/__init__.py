"""The loss: additive channels, each a pure function of tensors and configuration.

Read total.py first (the sum), then policy.py (channel 1; corrections.py and kl.py are its parts), sdpo.py (channel 2;
divergence.py is what the head computes for it) and replay_dpo.py (channel 3). `make_po_config` builds channel 1's
configuration for an objective by name.
"""

from composer_prime.config.policy import make_po_config

__all__ = ["make_po_config"]
