"""The token bucket by its clock: never more than its rate and its burst allow, and no slower than they."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.transport.connection import TokenBucket

BURST = 1000


# A sender that waits as required, with pauses of its own, has sent at most rate * t + burst bytes from any moment t ago
# at which it asked; also where a body is larger than the burst.
@given(
    sends=st.lists(st.tuples(st.integers(0, 3 * BURST), st.floats(0, 10)), min_size=1, max_size=30),
    rate=st.floats(1, 1e6),
)
def test_rate(sends, rate):
    now = 0.0
    bucket = TokenBucket(rate, BURST, lambda: now)
    spans: list[tuple[float, float, int]] = []
    for size, pause_s in sends:
        asked = now = now + pause_s
        now += bucket.delay_s(size)
        spans.append((asked, now, size))
    for first, (asked, *_) in enumerate(spans):
        sent = 0
        for _, moment, size in spans[first:]:
            sent += size
            assert sent <= (rate * (moment - asked) + BURST) * (1 + 1e-9) + 1e-9 * rate * moment
