"""torchft's own DiLoCo, where it is right (an outer optimizer for each fragment, all parameters covered)."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest
import torch
from joint_run import Blocks, adamw, assert_same_globals, inner_step, settings, together, train
from torch import nn

from diloco.fragments import partition

torchft = pytest.importorskip("torchft")
STEPS, PERIOD, PARTS, DELAY, LR, MOMENTUM = 16, 4, 2, 1, 0.7, 0.9


def reference(lighthouse: str, peer: int) -> dict[str, torch.Tensor]:
    """Final local parameters of torchft's DiLoCo; over gloo, a replica a thread."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    model = Blocks()
    modules = dict(model.named_modules())
    parts = []
    for fragment in partition(model.named_parameters(), PARTS):
        owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in fragment.parameters)
        parts.append(nn.ModuleList(modules[owner] for owner in owners))
    inner = adamw(model)
    outer = [torch.optim.SGD(part.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True) for part in parts]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=model.load_state_dict,
        state_dict=model.state_dict, min_replica_size=2, use_async_quorum=False, replica_id=f"replica_{peer}",
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=20), quorum_timeout=timedelta(seconds=20), init_sync=False, hostname="127.0.0.1",
    )  # fmt: skip
    try:
        with DiLoCo(manager, parts, inner, outer, sync_every=PERIOD, fragment_sync_delay=DELAY):
            for step in range(STEPS):
                inner_step(model, inner, peer, step)
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    finally:
        manager.shutdown(wait=False)


# Two peers end with the parameters that torchft's DiLoCo gives, fragment by fragment, with delay and momentum.
@pytest.mark.slow
def test_same_trajectory(make_rendezvous, key_file, monkeypatch):
    from torchft.coordination import LighthouseServer

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    url = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    expected = together(partial(reference, url, 0), partial(reference, url, 1))
    lighthouse.shutdown()
    values = {"sync_every": PERIOD, "fragments": PARTS, "delay": DELAY, "outer": {"lr": LR, "momentum": MOMENTUM}}
    address = make_rendezvous(start_peers=2).endpoint
    seen = together(
        *[partial(train, settings(address, key_file, name, **values), peer, STEPS) for peer, name in enumerate("ab")]
    )
    assert_same_globals(*seen)
    for trajectory, locals_ in zip(seen, expected, strict=True):
        for name, value in trajectory.local.items():
            assert torch.allclose(value, locals_[name], rtol=1e-4, atol=1e-5), name
