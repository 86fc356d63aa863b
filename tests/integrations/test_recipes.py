"""The recipes of docs/how-to/other-trainers.md do what the page says."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs/how-to/other-trainers.md"


def recipe(name: str, folder: Path, monkeypatch) -> object:
    """The page's code block as a module."""
    block = re.search(rf"<!-- recipe: {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / f"recipe_{name}.py").write_text(block[1])
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), *sys.path]))
    return importlib.import_module(f"recipe_{name}")


def test_monarch_s_ranks_add_up_to_one_step(tmp_path, monkeypatch):
    # Two actor processes, each with half of the sequences: the sum of their shares is the gradient of the whole step.
    pytest.importorskip("monarch.actor", exc_type=ImportError)
    page = recipe("monarch", tmp_path, monkeypatch)
    weights = torch.linspace(-1, 1, 5, requires_grad=True)
    totals = page.StepTotals(samples=4, tokens=16)
    for rank in range(2):
        page.policy_loss(page.tokens_of(rank, weights), totals, page.CONFIG, max_length=16)[0].backward()
    assert torch.allclose(page.step(2), weights.grad, atol=1e-7) and weights.grad.abs().max() > 1e-3


def test_torchforge_s_loss_is_the_published_formula(tmp_path, monkeypatch):
    # Its application's loss, written out: the mean over rows of the token mean of -(r A - 0.1 k3), on-policy.
    page = recipe("torchforge", tmp_path, monkeypatch)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 9, 12, generator=draw, requires_grad=True)
    response = torch.randint(0, 12, (3, 5), generator=draw)
    reference = -torch.rand(3, 5, generator=draw) * 3
    advantages, mask = torch.randn(3, 1, generator=draw), torch.arange(5) < torch.tensor([[5], [2], [4]])
    ours = page.composer_loss(logits, response, reference, advantages, mask)
    logprobs = logits[:, 3:8].log_softmax(-1).gather(-1, response[..., None]).squeeze(-1)
    gap = reference - logprobs
    per_token = -((logprobs - logprobs.detach()).exp() * advantages - 0.1 * (gap.exp() - gap - 1))
    theirs = ((per_token * mask).sum(1) / mask.sum(1)).mean()
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    assert abs(ours - theirs) <= 1e-6 and (gradients[0] - gradients[1]).abs().max() <= 1e-6
