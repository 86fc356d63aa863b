"""The configuration of the loss terms: each objective's own defaults, and what is refused."""

import pytest
from pydantic import ValidationError
from rows import make_po_config

from composer_prime.channels.policy import PolicyConfig
from composer_prime.config.channels import ChannelsConfig, ReplayDpoConfig
from composer_prime.config.problems import wrong_config


@pytest.mark.parametrize(
    ("objective", "denominator", "scaling", "low", "high", "correction"),
    [
        ("dr_grpo", "constant", "none", 0.2, 0.2, "dppo"),
        ("grpo", "sequence", "std", 0.2, 0.2, "none"),
        ("bnpo", "micro_batch", "std", 0.2, 0.2, "none"),
        ("dapo", "tokens", "std", 0.2, 0.28, "none"),
        ("gspo", "sequence", "std", 3e-4, 4e-4, "none"),
        ("cispo", "tokens", "std", 0.2, 0.2, "none"),
    ],
)
def test_an_objective_brings_its_own_defaults(objective, denominator, scaling, low, high, correction):
    # make_po_config, a section of a file, and a dump that is read back give the same values.
    made = make_po_config(objective)
    values = (made.denominator, made.advantage_scaling, made.clip_low, made.clip_high)
    assert values == (denominator, scaling, low, high)
    assert made.correction == correction
    assert ChannelsConfig(policy={"objective": objective}).policy == made
    assert PolicyConfig(**made.model_dump()) == made


def test_what_the_user_sets_wins():
    # Each of the objective's defaults can be overridden on its own.
    config = make_po_config("gspo", clip_high=0.1, correction="tis", advantage_scaling="none")
    assert (config.clip_low, config.clip_high, config.correction) == (3e-4, 0.1, "tis")
    assert config.advantage_scaling == "none"


@pytest.mark.parametrize(
    ("objective", "settings", "words"),
    [
        ("gpso", {}, "channels.policy.objective = 'gpso': expected 'dr_grpo', 'grpo'"),
        ("gpso", {}, "'dapo', 'gspo' or 'cispo'"),
        ("dapo", {"clip_hihg": 0.3}, "key channels.policy.clip_hihg; did you mean channels.policy.clip_high?"),
        ("dapo", {"clip_low": 1.5}, "clip_low = 1.5: expected less than 1"),
        ("dapo", {"loss": {"settings": {"share": 1}}}, "channels.policy.loss.name"),
        ("dapo", {"kl": {"weight": -1}}, "kl.weight = -1: expected greater than or equal to 0"),
    ],
)
def test_wrong_settings_name_the_remedy(objective, settings, words):
    # An unknown objective or setting gets the nearest known one; values in conflict are both named.
    with pytest.raises(ValidationError) as raised:
        make_po_config(objective, **settings)
    assert words in str(wrong_config(raised.value, [], section=("channels", "policy")))


def test_simpo_brings_its_own_temperature():
    # Its margin is a mean a token, so DPO's 0.1 would leave the loss flat; what is set wins, and a dump reads back.
    assert ReplayDpoConfig().temperature == 0.1
    assert ReplayDpoConfig(loss="simpo").temperature == 2.0
    made = ChannelsConfig(replay_dpo={"loss": "simpo", "temperature": 1.5}).replay_dpo
    assert made.temperature == 1.5 and ReplayDpoConfig(**made.model_dump()) == made


@pytest.mark.parametrize(
    ("channel", "values", "words"),
    [
        ("sdpo", {"weight": -0.1}, "greater than or equal to 0"),
        ("sdpo", {"beta": -0.1}, "greater than or equal to 0"),
        ("sdpo", {"beta": 1.1}, "less than or equal to 1"),
        ("sdpo", {"kind": "sampled"}, "beta is 0.5, but kind = sampled estimates KL"),
        ("replay_dpo", {"weight": -1}, "greater than or equal to 0"),
        ("replay_dpo", {"temperature": 0}, "greater than 0"),
        ("replay_dpo", {"loss": "dpo"}, "'cdpo', 'sigmoid', 'robust'"),
    ],
)
def test_values_that_cannot_be_are_refused(channel, values, words):
    # Weights and betas below 0, a sampled divergence that is not reverse.
    with pytest.raises(ValidationError) as raised:
        ChannelsConfig(**{channel: values})
    assert words in str(raised.value)
