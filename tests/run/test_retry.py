from composer_prime.run.retry import Restarts


# A process that keeps crashing is started again `limit` times, after pauses that double up to a minute; ten quiet
# minutes give all of them back.
def test_restarts_end_at_the_limit():
    restarts = Restarts()
    assert [restarts.pause_s(1.0, 8) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, None]
    assert restarts.pause_s(601.0, 8) == 1.0
    assert Restarts().pause_s(1.0, 0) is None
