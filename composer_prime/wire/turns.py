"""Names and words that the gateway and those who ask it for turns have in common."""

from __future__ import annotations

POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""
GATEWAY_TOKEN_VARIABLE = "COMPOSER_GATEWAY_TOKEN"
"""Environment variable that holds the gateway's bearer token."""


def context_overflow(num_prompt: int, max_context: int, num_new: int = 1) -> str:
    """Return how the error of a prompt begins that leaves no room for `num_new` more tokens.

    Clients recognize these words; renderers' own check uses them too.
    """
    return f"Prompt length ({num_prompt}) exceeds maximum context length ({max_context}) less {num_new} for the reply"
