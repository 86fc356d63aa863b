"""The loss: the sum of three terms, each a pure function of tensors and configuration.

Read total.py first (the sum), then policy.py, sdpo.py and replay_dpo.py. `make_po_config` builds the policy loss's
configuration for an objective by name.
"""

from composer_prime.config.policy import make_po_config

__all__ = ["make_po_config"]
