"""SDPO and replay-DPO are refused without what they need of the orchestrator."""

from pathlib import Path

import pytest

from composer_prime.config.load import resolve
from composer_prime.errors import ConfigError

A1 = str(Path(__file__).parents[2] / "configs" / "a1.toml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--channels.sdpo.weight", "1"], r"channels\.sdpo\.weight is 1, but there is no \[orchestrator\.hints\]"),
        (["--channels.replay_dpo.weight", "1"], r"weight is 1 and orchestrator\.preferences\.pairs_per_step is 0"),
        (["--orchestrator.preferences.pairs_per_step", "4"], r"weight is 0 and .*pairs_per_step is 4"),
        (["--orchestrator.hints.layers", '["llm"]'], r"orchestrator\.hints\.llm names no endpoint"),
        (["--orchestrator.hints.layers", '["template", "template"]'], "each only once"),
        (["--orchestrator.hints.weights", '{"failed": -1}'], r"weights\.failed = -1: expected greater"),
    ],
)
def test_a_loss_term_without_its_input_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        resolve(["@", A1, *words])


def test_a_loss_term_with_its_input_is_accepted():
    words = ["--orchestrator.hints.max_turns", "4", "--channels.sdpo.weight", "0.5"]
    words += ["--orchestrator.preferences.pairs_per_step", "4", "--channels.replay_dpo.weight", "0.1"]
    config = resolve(["@", A1, *words])
    assert config.orchestrator.hints.layers == ["template"] and config.orchestrator.preferences.pairs is None
