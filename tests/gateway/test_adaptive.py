"""The adaptive limit by itself."""

from __future__ import annotations

from composer_prime.wire.node import Status
from orchestrator.gateway.adaptive import AdaptiveLimit


def observe(limit: AdaptiveLimit, running: int, in_use: int, waiting: int = 0, kv_used: float = 0.1) -> None:
    report = Status(version=0, running=running, waiting=waiting, kv_used=kv_used, tokens_per_s=0.0, canary_error=None)
    limit.observe({"a": report}, queued=0, in_use=in_use)


def test_the_limit_finds_what_the_nodes_can_take():
    """With nodes that queue above 40 rollouts, the limit settles around 40 and stays within its bounds."""
    limit = AdaptiveLimit(floor=8, ceiling=512)
    seen = []
    for _ in range(200):
        in_use = limit.limit()
        observe(limit, min(in_use, 40), in_use, waiting=max(0, in_use - 40))
        seen.append(limit.limit())
    assert seen[0] == 64
    settled = seen[20:]
    assert min(settled) >= 28 and max(settled) <= 56
    assert limit.decreases >= 1


def test_an_unused_limit_does_not_rise_and_a_full_cache_lowers_it():
    """Only a limit that is used proves anything; KV pressure counts like a queue; floor and ceiling hold."""
    limit = AdaptiveLimit(floor=4, ceiling=100)
    observe(limit, 2, in_use=2)
    limit.observe({}, queued=0, in_use=32)
    assert limit.limit() == 32
    for _ in range(20):
        observe(limit, 32, in_use=limit.limit(), kv_used=0.99)
    assert limit.limit() == 4
    for _ in range(200):
        observe(limit, 8, in_use=limit.limit())
    assert limit.limit() == 100


def test_one_full_node_does_not_set_the_limit_of_the_fleet():
    """255 nodes have room and one is full: the limit stays where it is; when most are full, the others' is left."""
    for full, falls in ((1, False), (250, True)):
        limit = AdaptiveLimit(floor=8, ceiling=4096)
        for _ in range(8):
            observe(limit, 4096, in_use=limit.limit())
        reports = {
            f"n{i}": Status(version=0, running=16, waiting=0, kv_used=kv, tokens_per_s=0.0, canary_error=None)
            for i, kv in enumerate([0.97] * full + [0.3] * (256 - full))
        }
        for _ in range(44):
            limit.observe(reports, queued=0, in_use=limit.limit())
        assert (limit.limit() < 600) if falls else (limit.limit() == 4096)


def test_requests_that_wait_for_a_few_nodes_hold_the_limit_where_it_is():
    """Most of the fleet is idle, so the limit does not fall; more rollouts would only wait too, so it does not rise."""
    limit = AdaptiveLimit(floor=8, ceiling=256)
    before = limit.limit()
    report = Status(version=0, running=20, waiting=0, kv_used=0.1, tokens_per_s=0.0, canary_error=None)
    for _ in range(20):
        limit.observe({"a": report}, queued=0, held=before // 2, in_use=before)
    assert (limit.limit(), limit.decreases) == (before, 0)


def test_a_node_adds_its_part_and_takes_it_with_it():
    """A second node doubles the limit; when it has not served for a while, its part is gone."""
    limit = AdaptiveLimit(floor=8, ceiling=4096)
    report = Status(version=0, running=32, waiting=0, kv_used=0.8, tokens_per_s=0.0, canary_error=None)
    limit.observe({"a": report}, queued=0, in_use=32)
    limit.observe({"a": report, "b": report}, queued=0, in_use=32)
    assert limit.limit() == 64
    seen = []
    for _ in range(20):
        limit.observe({"a": report}, queued=0, in_use=32)
        seen.append(limit.limit())
    assert seen[0] == 64 and seen[-1] == 32
