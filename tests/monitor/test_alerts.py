"""Alerts: what a user should know of a step, with the setting to turn."""

from __future__ import annotations

import pytest

from composer_prime.config.trainer import OptimConfig
from composer_prime.monitor.alerts import alerts

USUAL = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "optim/lr": 1e-4,
    "optim/grad_norm": 1.0,
    "policy/mismatch_kl": 0.002,
    "policy/entropy": 0.7,
    "rollout/truncated_share": 0.1,
}


def names(*lines: dict, optimizer: str = "adamw") -> dict[str, str]:
    """Return the alerts of the last of `lines`, each a step's figures."""
    steps = {number: {"step": number, **USUAL, **line} for number, line in enumerate(lines, 1)}
    return dict(alerts(steps, len(lines), OptimConfig.model_validate({"type": optimizer})))


# A run whose figures stay as they are says nothing, also in its first steps.
def test_a_healthy_run_has_no_alert():
    assert names({}) == {} == names(*[{}] * 30)


# Each thing that goes wrong has its own alert, which names the setting to turn.
@pytest.mark.parametrize(
    ("figures", "name", "setting"),
    [
        ({"optim/lr": 10.0}, "optim/lr", "trainer.optim.lr"),
        ({"optim/grad_norm": 11.0}, "optim/grad_norm", "trainer.optim.max_grad_norm"),
        ({"policy/mismatch_kl": 0.05}, "policy/mismatch_kl", "orchestrator.max_staleness"),
        ({"policy/entropy": 1e-4}, "policy/entropy", "orchestrator.sampling.temperature"),
        ({"rollout/truncated_share": 0.9}, "rollout/truncated_share", "orchestrator.sampling.max_tokens"),
    ],
)
def test_each_alert_names_its_setting(figures, name, setting):
    found = names(*[{}] * 12, figures)
    assert list(found) == [name] and setting in found[name]


# The usual rates are those of AdamW and Muon: of an optimizer of the user's none is known.
def test_an_own_optimizer_has_its_own_rates():
    assert names({"optim/lr": 0.1}, optimizer="torch.optim:SGD") == {}
    assert list(names({"optim/lr": 0.1}, optimizer="muon")) == ["optim/lr"]


# Ten steps in a row without reward are said with the first of them; nine, or a mean of 0 with a spread, are not.
def test_no_reward_since_a_step():
    silent = {"reward/mean": 0.0, "reward/std": 0.0}
    assert "since step 4:" in names(*[{}] * 3, *[silent] * 10)["reward/mean"]
    assert names(*[{}] * 3, *[silent] * 9) == {}
    assert names(*[silent] * 12, {"reward/mean": 0.0, "reward/std": 1.0}) == {}


# A figure that jumps needs a usual value: ten steps before it. Tiny divergences double without any news.
def test_jumps_need_a_usual_value():
    assert names(*[{}] * 9, {"optim/grad_norm": 11.0}) == {}
    assert names(*[{"policy/mismatch_kl": 1e-7}] * 12, {"policy/mismatch_kl": 1e-3}) == {}


# A step that trained nothing has a gradient of 0, which is no usual value: where most are such, the others are no news.
def test_steps_that_train_nothing_have_no_usual_value():
    assert names(*[{"optim/grad_norm": 0.0}] * 20, *[{}] * 9, {}) == {}
    assert list(names(*[{"optim/grad_norm": 0.0}] * 20, *[{}] * 10, {"optim/grad_norm": 11.0})) == ["optim/grad_norm"]


class Counted(dict):
    """Counts how often a line is read."""

    read = 0

    def __getitem__(self, step: int) -> dict:
        self.read += 1
        return super().__getitem__(step)


# A step is judged by what was before it, and not in more time after more steps.
def test_a_long_run_costs_no_more_a_step():
    short, long = (Counted({step: {"step": step, **USUAL} for step in range(1, last + 1)}) for last in (200, 5000))
    assert list(alerts(short, 200, OptimConfig())) == list(alerts(long, 5000, OptimConfig())) == []
    assert short.read == long.read
