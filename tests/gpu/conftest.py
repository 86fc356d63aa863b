"""The device that a check computes on: a CUDA device in full size (`-m gpu`), and the CPU in small (`-m slow`)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch


class Place(NamedTuple):
    """Where and how large a check computes."""

    device: str
    small: bool


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return Place(device=request.param, small=request.param == "cpu")
