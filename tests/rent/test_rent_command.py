"""`orchestrator rent` with a command on PATH that stands in for `vastai`."""

from __future__ import annotations

import base64
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from provider_answers import new_invite, vast_offer

from composer_prime.errors import ConfigError, ProviderError
from composer_prime.run.rentals import Rental, RentalRecord
from composer_prime.wire.enrollment import release_package
from orchestrator.rent.command import main
from orchestrator.rent.machines import RentalBudget

INVITE = new_invite().text()


class FakeVast:
    """The stand-in's state: what it offers, what runs, and which calls were made."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"
        self.set(offers=[], instances=[], refused=[], stuck=[], killed=False, key="key", calls=[])

    def get(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def set(self, **values: Any) -> None:
        self.path.write_text(json.dumps({**(self.get() if self.path.exists() else {}), **values}))

    def calls(self, first: str) -> list[list[str]]:
        return [call["words"] for call in self.get()["calls"] if call["words"][0] == first]


@pytest.fixture
def vast(tmp_path, monkeypatch) -> FakeVast:
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "vastai"
    command.write_text(f"#!{sys.executable} -SE\n" + Path(__file__).with_name("fake_vastai.py").read_text())
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_VASTAI", str(tmp_path / "state.json"))
    return FakeVast(tmp_path)


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run_id").write_text("a1-12345678\n")
    return tmp_path / "run"


def rent(run: Path, *words: str, count: int = 2) -> int:
    wanted = ["--run", str(run), "--provider", "vast", "--gpu", "H100", "--count", str(count), "--max-price", "2.5"]
    return main([*wanted, "--invite", INVITE, "--package", "a.whl", *words])


# The cheapest two are rented, recorded with their ids, shown, and ended: the provider then lists none.
@pytest.mark.process
def test_rent_and_stop(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 2.4), vast_offer(2, 1.9), vast_offer(3, 2.0), vast_offer(4, 2.9)])
    assert rent(run, "--yes") == 0
    assert [words[2] for words in vast.calls("create")] == ["2", "3"]
    assert [rental.instance_id for rental in RentalRecord(run).rentals()] == ["9000", "9001"]
    assert main(["--run", str(run), "--status"]) == 0
    assert main(["--run", str(run), "--stop"]) == 0
    assert vast.get()["instances"] == []
    assert not any(rental.open for rental in RentalRecord(run).rentals())
    shown = capsys.readouterr().out
    assert "2 machines of vast: $3.90 an hour, $93.60 a day" in shown
    assert "billed now: 2 machines, $3.90 an hour" in shown
    assert "nothing ends these machines by itself: orchestrator rent --stop --run" in shown


# The invite reaches the machine in its script, which fits into Vast's 4,048 characters, and is shown nowhere else.
@pytest.mark.process
def test_secret(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 2.0)])
    assert rent(run, "--yes", count=1) == 0
    [script] = [call["stdin"] for call in vast.get()["calls"] if call["words"][0] == "create"]
    assert len(script) < 4048
    text = gzip.decompress(base64.b64decode(script.split()[1])).decode()
    assert f"export COMPOSER_INVITE={INVITE}\n" in text and "inference join" in text
    words = [word for call in vast.get()["calls"] for word in call["words"]]
    assert INVITE not in " ".join(words) + capsys.readouterr().out + (run / "rentals.jsonl").read_text()


# An offer that is taken meanwhile is passed over for the next one.
@pytest.mark.process
def test_refused_offer(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 1.0), vast_offer(2, 1.5), vast_offer(3, 2.0)], refused=[1])
    assert rent(run, "--yes") == 0
    assert [rental.failed for rental in RentalRecord(run).rentals()] == [True, False, False]
    assert "no_such_ask" in capsys.readouterr().out


# When fewer can be started than wanted, the others are recorded and named with the command that ends them.
@pytest.mark.process
def test_partial_start(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 1.0), vast_offer(2, 1.5)], refused=[1])
    assert rent(run, "--yes") == 1
    assert "1 of 2 machines were started. They cost money until: orchestrator rent --stop" in capsys.readouterr().out


# A machine whose start call died after it was made is found by its label, and ended with the others.
@pytest.mark.process
def test_lost_answer(vast, run):
    vast.set(offers=[vast_offer(1, 1.0)], killed=True)
    assert rent(run, "--yes", count=1) == 0
    assert [rental.instance_id for rental in RentalRecord(run).rentals()] == ["9000"]


# A crash between the call and the record loses nothing: `--stop` finds the machine by its label alone.
@pytest.mark.process
def test_crash_before_record(vast, run):
    vast.set(offers=[vast_offer(1, 1.0)])
    assert rent(run, "--yes", count=1) == 0
    record = run / "rentals.jsonl"
    asked = json.loads(record.read_text().splitlines()[0])
    asked["time"] -= 3600  # a start call that was cut off just now would be waited for
    record.write_text(json.dumps(asked) + '\n{"time": 17, "event": "star')
    assert main(["--run", str(run), "--stop"]) == 0
    assert vast.get()["instances"] == []


# A stop that the provider refuses is tried again until the machine is gone.
@pytest.mark.process
def test_stop_again(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 1.0)])
    assert rent(run, "--yes", count=1) == 0
    vast.set(stuck=["9000"])
    assert main(["--run", str(run), "--stop"]) == 0
    assert len(vast.calls("destroy")) == 2
    assert "not stopped yet" in capsys.readouterr().out


# Machines of the account that are not this run's are never touched.
@pytest.mark.process
def test_other_machines(vast, run):
    other = {"id": 5, "label": "somebody", "actual_status": "running", "dph_total": 1.0}
    vast.set(offers=[vast_offer(1, 1.0)], instances=[other])
    assert rent(run, "--yes", count=1) == 0
    assert main(["--run", str(run), "--stop"]) == 0
    assert vast.get()["instances"] == [other]


# Without --yes and without a terminal nothing is rented, and no offer is taken when none is cheap enough.
@pytest.mark.process
def test_no_spending(vast, run):
    vast.set(offers=[vast_offer(1, 2.0), vast_offer(2, 2.8)])
    with pytest.raises(ConfigError, match="pass --yes"):
        rent(run, count=1)
    with pytest.raises(ProviderError, match=r"1 of 2 machines .* the next costs \$2.80: raise --max-price"):
        rent(run, "--yes")
    assert vast.calls("create") == []
    assert not (run / "rentals.jsonl").exists()


# A key that the provider does not take is an error with the command that sets one, although vastai's status is 0.
@pytest.mark.process
def test_logged_out(vast, run):
    vast.set(key="")
    with pytest.raises(ProviderError, match=r"requires login.*`vastai set api-key KEY`"):
        rent(run, "--yes")


# SIGTERM ends a watched command, and the machines with it.
@pytest.mark.process
def test_watch_ended(vast, run):
    vast.set(offers=[vast_offer(1, 1.0)])
    code = "import sys; from orchestrator.rent.command import main; sys.exit(main(sys.argv[1:]))"
    words = ["--provider", "vast", "--count", "1", "--max-price", "2", "--max-hours", "5", "--invite", INVITE, "--yes",
             "--package", "a.whl"]  # fmt: skip
    watch = subprocess.Popen(
        [sys.executable, "-c", code, "--run", str(run), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert watch.stdout is not None
    for line in watch.stdout:
        if "must stay running" in line:
            watch.send_signal(signal.SIGTERM)
            break
    assert "no machine is billed any more" in watch.communicate(timeout=120)[0]
    assert vast.get()["instances"] == []


# A budget is spent when the hours are over, or when its dollars do not last for the time of stopping.
def test_budget():
    rentals = [Rental(label="a", provider="vast", gpu="H100", usd_per_hour=12.0, asked_at=1000.0, instance_id="1")]
    assert RentalBudget(hours=1).spent(rentals, 1000.0 + 3599) is None
    assert "1.00 hours of 1" in str(RentalBudget(hours=1).spent(rentals, 1000.0 + 3600))
    assert RentalBudget(dollars=12).spent(rentals, 1000.0 + 3290) is None
    assert "$11.00 of $12.00" in str(RentalBudget(dollars=12).spent(rentals, 1000.0 + 3300))
    assert RentalBudget().spent(rentals, 1e12) is None


# A watch ends the machines by itself when the budget is spent.
@pytest.mark.process
def test_budget_ends_machines(vast, run, capsys):
    vast.set(offers=[vast_offer(1, 2.0)])
    assert rent(run, "--yes", "--max-dollars", "0.01", count=1) == 0
    assert vast.get()["instances"] == []
    assert "stopping the machines: $0.00 of $0.01 are spent" in capsys.readouterr().out


# The command that is not there is named with the way to install it.
def test_not_installed(run, monkeypatch):
    monkeypatch.setenv("PATH", str(run))
    with pytest.raises(ProviderError, match="vastai is not installed: `uv tool install vastai`"):
        rent(run, "--yes")


# A dry run prints every call and makes none, with or without the provider's command.
@pytest.mark.parametrize("provider", ["vast", "runpod", "lambda", "prime"])
def test_dry_run(provider, run, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(run))
    words = ["--run", str(run), "--provider", provider, "--count", "8", "--max-price", "2.5", "--ssh-key", "k"]
    if release_package() is None:  # installed from a folder, as in a checkout: no other machine could install it
        with pytest.raises(ConfigError, match=r"--package is missing.*from a folder or file"):
            main([*words, "--dry-run"])
    assert main([*words, "--package", "a.whl", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for step in ("offers", "start    8 x", "list", "stop", "at most $20.00 an hour for 8 machines"):
        assert step in shown
    assert not (run / "rentals.jsonl").exists()


# Wrong command lines: no such run, no price, no key for Lambda, a run that other machines cannot reach.
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--provider", "vast", "--count", "1"], "--max-price is missing"),
        (["--count", "1", "--max-price", "1"], "--provider is missing"),
        (["--provider", "lambda", "--count", "1", "--max-price", "1"], "need --ssh-key"),
    ],
)
def test_wrong_words(words, message, run, tmp_path):
    with pytest.raises(ConfigError, match=message):
        main(["--run", str(run), *words])
    with pytest.raises(ConfigError, match="is not a run directory"):
        main(["--run", str(tmp_path / "other"), *words])


# Numbers that make no sense are refused by the command line.
@pytest.mark.parametrize("words", [["--count", "0"], ["--max-price", "-1"], ["--max-hours", "nan"], ["--disk", "x"]])
def test_wrong_numbers(words, run):
    with pytest.raises(SystemExit):
        main(["--run", str(run), "--provider", "vast", *words])
