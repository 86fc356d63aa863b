import pytest

from composer_prime.llm import client


@pytest.fixture(autouse=True)
def loopback_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPBACK_KEY", "made-up")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_RETRY_S", 0.05)
