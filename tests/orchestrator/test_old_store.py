"""A run directory of an earlier release is resumed: its weights are published anew."""

from __future__ import annotations

import asyncio

import pytest

from composer_prime.errors import WireError
from composer_prime.run.weights import WeightStore
from orchestrator.pipeline import Pipeline


class Refusing:
    """A gateway that cannot read a manifest."""

    def publish(self, signed: bytes) -> int:
        raise WireError("not a signed message")


# At the start the store's newest manifest may be of an earlier release; one that the trainer announces may not.
def test_an_old_manifest_is_left_to_the_trainer(tmp_path, caplog):
    run = Pipeline.__new__(Pipeline)  # without a run's parts
    run.store, run.gateway = WeightStore(tmp_path), Refusing()
    run.store.put_manifest(3, b"old")
    asyncio.run(run._publish(3, required=False))
    assert "weights v3" in caplog.text
    with pytest.raises(WireError):
        asyncio.run(run._publish(3))
