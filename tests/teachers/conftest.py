import pytest


@pytest.fixture(autouse=True)
def loopback_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "made-up")
