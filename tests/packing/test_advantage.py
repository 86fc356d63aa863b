"""Group advantages."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_prime.errors import NonFiniteError
from orchestrator.rollouts.groups import group_advantages, has_signal

rewards = st.lists(st.floats(-5, 5), min_size=2, max_size=16)


@given(rewards)
def test_std_is_trl_s_formula(rewards_G):
    # (r - mean) / (std + 1e-4), std with Bessel's correction: TRL's GRPOTrainer with scale_rewards="group".
    r = torch.tensor(rewards_G, dtype=torch.float64)
    expected = (r - r.mean()) / (r.std() + 1e-4)
    assert torch.allclose(torch.tensor(group_advantages(rewards_G, "std"), dtype=torch.float64), expected, atol=1e-9)


@given(rewards)
def test_none_only_subtracts_the_mean(rewards_G):
    # Advantages sum to zero and keep the rewards' differences.
    advantages = group_advantages(rewards_G, "none")
    assert abs(sum(advantages)) < 1e-9
    assert math.isclose(advantages[0] - advantages[1], rewards_G[0] - rewards_G[1], abs_tol=1e-9)


def test_edges():
    # Equal rewards and groups of one carry no signal; a NaN reward is refused.
    assert not has_signal(group_advantages([1.0] * 4, "std"))
    assert not has_signal(group_advantages([98765.4321] * 3, "std")), "their mean is not quite 98765.4321"
    assert group_advantages([3.0], "std") == [0.0]
    assert has_signal(group_advantages([1.0, 0.0], "none"))
    with pytest.raises(NonFiniteError, match="mark failed rollouts as failed"):
        group_advantages([1.0, math.nan], "none")
