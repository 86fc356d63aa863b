"""What `orchestrator rent` counts as billed, and that every machine's billing ends, whatever fails meanwhile."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from provider_answers import LAMBDA_KINDS, RUNPOD_OFFERS, new_invite, service

from composer_prime.errors import ConfigError, InviteError, ProviderError, ProviderLoginError, ProviderRefusedError
from composer_prime.run.keys import RunKeys
from composer_prime.run.rentals import Rental, RentalRecord
from orchestrator.rent.calls import ProviderCall, _says_refused
from orchestrator.rent.command import main
from orchestrator.rent.http_providers import Lambda, RunPod
from orchestrator.rent.machines import RentalBudget, RentedMachines
from orchestrator.rent.provider import Offer, Order
from orchestrator.rent.usefulness import RunUse

OFFER = Offer(offer_id="o", gpu="H100", gpus=1, gpu_memory_gb=80, disk_gb=None, usd_per_hour=2.0, stock=None)
INTERNAL_ERROR = {"errors": [{"message": "try later", "extensions": {"code": "INTERNAL_SERVER_ERROR"}}]}


class FakeRunPod:
    """The pods of an account behind a server on loopback, and what it does instead of an answer."""

    def __init__(self) -> None:
        self.pods: dict[str, str] = {}
        """Name by id."""
        self.start_error: Any = None
        """The answer to a start, although there is a pod: it is in the third list from then on."""
        self.list_errors = 0
        self.stops_without_effect = 0
        self.unreachable: set[str] = set()
        self._late: dict[str, str] = {}
        self._lists_until_late = 2

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path.startswith("/pods/"):
            return (500, "no route to the pod") if path.removeprefix("/pods/") in self.unreachable else (200, {})
        query, variables = body["query"], body["variables"]
        if "gpuTypes" in query:
            return 200, RUNPOD_OFFERS
        if "podFindAndDeployOnDemand" in query:
            pod, name = f"pod{len(self.pods) + len(self._late)}", variables["input"]["name"]
            if self.start_error is not None:
                self._late[pod] = name
                return self.start_error
            self.pods[pod] = name
            return 200, {"data": {"podFindAndDeployOnDemand": {"id": pod}}}
        if "podTerminate" in query:
            if self.stops_without_effect:
                self.stops_without_effect -= 1
            else:
                del self.pods[variables["podId"]]
            return 200, {"data": {"podTerminate": None}}
        if self.list_errors:
            self.list_errors -= 1
            return 503, "try again"
        listed = [{"id": pod, "name": name, "desiredStatus": "RUNNING"} for pod, name in self.pods.items()]
        self._lists_until_late -= len(self._late)
        if self._lists_until_late == 0:
            self.pods.update(self._late)
            self._late.clear()
        return 200, {"data": {"myself": {"pods": listed}}}


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    (tmp_path / "run_id").write_text("a1-12345678\n")
    monkeypatch.setenv("RUNPOD_API_KEY", "right-key")
    monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
    return tmp_path


def rent(run: Path, url: str, *words: str, count: int = 2) -> int:
    wanted = ["--run", str(run), "--provider", "runpod", "--gpu", "RTX 4090", "--count", str(count), "--yes"]
    given = [] if "--invite" in words else ["--invite", new_invite().text()]
    return main([*wanted, "--max-price", "0.5", "--package", "a.whl", *given, *words], {"runpod": RunPod(url)})


def orders(label: str, offer: Offer) -> Order:
    return Order(label=label, script="true\n", disk_gb=100)


def write(record: RentalRecord, *entries: dict[str, Any], age_s: float = 0.0) -> None:
    """Write entries of the record as if they were made `age_s` ago."""
    defaults = {"time": time.time() - age_s, "label": "composer-a1-0", "provider": "runpod", "gpu": "1 x H100"}
    lines = [json.dumps({**defaults, "usd_per_hour": 2.0, **entry}) + "\n" for entry in entries]
    record.path.write_text("".join(lines))


# A terminal that is gone keeps no machine from being stopped.
def test_terminal_gone(run, monkeypatch):
    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    account = FakeRunPod()
    with service(account.answer) as url:
        assert rent(run, url) == 0
        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["--run", str(run), "--stop"], {"runpod": RunPod(url)}) == 0
    assert account.pods == {}


# An unforeseen error with one machine keeps no other from being stopped.
def test_one_machine_fails(run):
    class Odd(RunPod):
        reads = 0

        def read_stop(self, answer: str) -> None:
            self.reads += 1
            if self.reads == 1:
                raise KeyError("unforeseen")

    account, said = FakeRunPod(), []
    with service(account.answer) as url:
        rented = RentedMachines(Odd(url), RentalRecord(run), said.append, poll_s=0.01)
        assert rented.start([OFFER, OFFER], 2, "a1", orders, RentalBudget()) == 2
        rented.stop()
    assert account.pods == {}
    assert "not stopped yet: 'unforeseen'" in said


# A stop that was accepted is asked for again while the machine stays listed.
def test_stop_without_effect(run, monkeypatch):
    monkeypatch.setattr("orchestrator.rent.machines._STOP_AGAIN_S", 0.0)
    account, said = FakeRunPod(), []
    account.stops_without_effect = 1
    with service(account.answer) as url:
        rented = RentedMachines(RunPod(url), RentalRecord(run), said.append, poll_s=0.01)
        assert rented.start([OFFER], 1, "a1", orders, RentalBudget()) == 1
        rented.stop()
    assert account.pods == {}
    assert sum(line.startswith("stopping composer-") for line in said) == 2


# No machine is started once the budget is spent.
def test_budget_between_starts(run):
    class OfOneMachine(RentalBudget):
        def spent(self, rentals: list[Rental], now: float) -> str | None:
            return "enough" if rentals else None

    account, said = FakeRunPod(), []
    with service(account.answer) as url:
        rented = RentedMachines(RunPod(url), RentalRecord(run), said.append, poll_s=0.01)
        assert rented.start([OFFER, OFFER, OFFER], 3, "a1", orders, OfOneMachine()) == 1
    assert len(account.pods) == 1
    assert said[-1] == "no further machine is started: enough"


# Without a budget too, a signal in mid-start ends the command with the line that ends the billing.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP])
def test_signal_in_mid_start(number, run, capsys):
    class Signaled(FakeRunPod):
        def answer(self, path: str, body: Any) -> tuple[int, Any]:
            if "podFindAndDeployOnDemand" in body["query"]:
                assert callable(signal.getsignal(number))
                os.kill(os.getpid(), number)
            return super().answer(path, body)

    before = signal.getsignal(number)
    with service(Signaled().answer) as url, pytest.raises(KeyboardInterrupt):
        rent(run, url)
    assert signal.getsignal(number) == before
    assert "what was started costs money until: orchestrator rent --stop" in capsys.readouterr().out


# So does a record that cannot be written.
def test_full_disk_in_mid_start(run, monkeypatch, capsys):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RentalRecord, "started", full)
    with service(FakeRunPod().answer) as url, pytest.raises(OSError, match="No space left"):
        rent(run, url)
    assert "what was started costs money until: orchestrator rent --stop" in capsys.readouterr().out


# A record that cannot be written keeps no machine from being stopped, and is named as what it is.
def test_full_disk_while_stopping(run, capsys):
    account, record = FakeRunPod(), RentalRecord(run)
    account.pods["pod7"] = "composer-a1-0"
    write(record, {"event": "asked"}, {"event": "started", "instance_id": "pod7"})
    full = RentalRecord(run)
    full.path = Path("/dev/full")
    full.rentals = record.rentals
    with service(account.answer) as url:
        RentedMachines(RunPod(url), full, print, poll_s=0.01).stop()
    shown = capsys.readouterr().out
    assert account.pods == {} and "runpod lists none of this run's machines: no machine is billed any more" in shown
    assert "/dev/full cannot be written (No space left on device), so it still counts composer-a1-0 as billed" in shown
    assert "cannot be listed" not in shown


# While machines are stopped signals do not end the command, and what its starter ignores (nohup) it always ignores.
def test_signals(run, capsys):
    handlers: dict[str, list[Any]] = {}
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)

    class Watched(FakeRunPod):
        def answer(self, path: str, body: Any) -> tuple[int, Any]:
            handlers[body["query"].split()[1]] = [signal.getsignal(number) for number in numbers]
            return super().answer(path, body)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        outside = [signal.getsignal(number) for number in numbers]
        with service(Watched().answer) as url:
            assert rent(run, url, "--max-dollars", "0.01", count=1) == 0
        assert [signal.getsignal(number) for number in numbers] == outside
    finally:
        signal.signal(signal.SIGHUP, before)
    started, stopped = handlers["Start($input:"], handlers["Stop($podId:"]
    assert all(map(callable, started[:3])) and started[3] is signal.SIG_IGN
    assert stopped == [signal.SIG_IGN] * 4
    shown = capsys.readouterr().out
    assert "signals do not end this. Should it be killed: orchestrator rent --stop" in shown
    assert "no machine is billed any more" in shown


# A start whose answer is lost is not tried again. Its rental stays open, costs money, and `stop` waits for the machine.
@pytest.mark.parametrize("lost", [(502, "bad gateway"), (200, INTERNAL_ERROR)])
def test_lost_answer_appears_late(lost, run):
    account, said = FakeRunPod(), []
    account.start_error = lost
    with service(account.answer) as url:
        rented = RentedMachines(RunPod(url), RentalRecord(run), said.append, poll_s=0.01)
        assert rented.start([OFFER, OFFER, OFFER], 1, "a1", orders, RentalBudget()) == 0
        [rental] = rented.rentals()
        assert rental.open and rental.instance_id is None and rental.call_ended_at is not None
        assert rental.usd(rental.asked_at + 3600) == 2.0
        rented.stop()
    assert account.pods == {}
    assert not rented.rentals()[0].open
    assert any(line.startswith("waiting 1") and rental.label in line for line in said)
    assert said[-1] == "runpod lists none of this run's machines: no machine is billed any more"


# The wait counts from the end of the call. When no such machine was ever listed, that is said.
def test_lost_answer_never_appears(run):
    record, said = RentalRecord(run), []
    write(record, {"event": "asked"}, {"event": "unknown", "reason": "502"}, age_s=121)
    with service(FakeRunPod().answer) as url:
        RentedMachines(RunPod(url), record, said.append, poll_s=0.01).stop()
    assert "Not certain is composer-a1-0: its start call got no answer" in said[-1]
    assert "no machine is billed" not in said[-1]


# Only what HTTP answered with 4xx is a refusal; a timeout, a 5xx, a network error and a word like 4711 are none.
def test_refusals():
    refused = ['{"error": true, "status_code": 410, "msg": "no_such_ask"}', "API request failed: HTTP 422: bad",
               "400 Client Error: Bad Request", "API key unauthorized. Please check"]  # fmt: skip
    unknown = ['{"status_code": 502, "msg": "error 404"}', "HTTP 408: timeout", "502 Server Error", "Request failed: "
               "connection reset", "offer 4711", ""]  # fmt: skip
    assert [_says_refused(text) for text in refused] == [True] * len(refused)
    assert [_says_refused(text) for text in unknown] == [False] * len(unknown)
    with pytest.raises(ProviderRefusedError, match="no longer any instances"):
        RunPod().read_start('{"errors": [{"message": "There are no longer any instances"}], "data": null}')


# A given invite is read before anything is spent: it must be of this run, live, known, and have enough uses left.
@pytest.mark.parametrize(
    ("values", "uses", "message"),
    [
        (
            {"run_id": "b2-12345678"},
            None,
            "is of run b2-12345678, .* is run a1-12345678: leave out --invite",
        ),
        ({"expires_s": -60.0}, None, "the invite expired at .* UTC, it is .* UTC: leave out"),
        ({}, 0, "the run a1-12345678 has no such invite: leave out"),
        ({}, 3, "the invite admits 3 more nodes, the machines have 4 GPUs, one a node: leave out"),
    ],
)
def test_wrong_invite(values, uses, message, run):
    invite = new_invite(**values)
    if uses is not None:
        (run / "keys").mkdir()
        key = invite.keys.own.public if uses else b"another"
        RunKeys(run / "keys").registry.invite(key, uses=uses or 1, expires=invite.expires)
    with pytest.raises(InviteError, match=message):
        rent(run, "http://127.0.0.1:9", "--invite", invite.text(), "--gpus", "2")
    assert not (run / "rentals.jsonl").exists()


# A string that is no invite is refused at once, also one from the environment.
def test_no_invite(run, monkeypatch):
    monkeypatch.setenv("COMPOSER_INVITE", "cpi1.short")
    with pytest.raises(InviteError, match="was cut or altered"):
        main(["--run", str(run), "--provider", "runpod", "--count", "1", "--max-price", "1", "--yes", "--package", "a"])


# A machine that cannot be reached keeps no other from its set-up, and the budget ends the wait for it.
def test_set_up(run):
    account, said, set_up = FakeRunPod(), [], []
    account.unreachable = {"pod0"}

    class OverSsh(RunPod):
        def address_call(self, instance_id: str) -> ProviderCall:
            base = self.url.removesuffix("/graphql")
            return ProviderCall(login=self.login, url=f"{base}/pods/{instance_id}", key_variable="RUNPOD_API_KEY")

        def setup_call(self, answer: str, order: Order) -> ProviderCall:
            set_up.append(order.label)
            return self.list_call()

    class UntilSetUp(RentalBudget):
        def spent(self, rentals: list[Rental], now: float) -> str | None:
            return "enough" if set_up else None

    with service(account.answer) as url:
        rented = RentedMachines(OverSsh(f"{url}/graphql"), RentalRecord(run), said.append, poll_s=0.01)

        assert rented.start([OFFER, OFFER], 2, "a1", orders, UntilSetUp()) == 1
    [lost, reached] = rented.rentals()
    assert set_up == [reached.label]
    assert any("no route to the pod" in line and lost.label in line for line in said)
    assert f"{lost.label} could not be set up (enough): it costs money until it is stopped" in said


# A machine that ended by itself is recorded as ended, so that its hours and dollars stop. One is found by its id too.
def test_ended_by_itself(run, capsys):
    record, account = RentalRecord(run), FakeRunPod()
    started = {"event": "started", "instance_id": "pod7"}
    with service(account.answer) as url:
        providers = {"runpod": RunPod(url)}
        account.pods["pod7"] = "renamed by its owner"
        write(record, {"event": "asked"}, started, age_s=7200)
        assert main(["--run", str(run), "--status"], providers) == 0
        shown = capsys.readouterr().out
        assert "  running\nbilled now: 1 machine, $2.00 an hour; at most $4.0" in shown
        account.pods.clear()
        assert main(["--run", str(run), "--status"], providers) == 0
        assert "not listed: no longer billed\nbilled now: 0 machines" in capsys.readouterr().out
        assert not record.rentals()[0].open
        # Not ended: the next rent is refused for its two hours. Ended: it goes on to the offers.
        write(record, {"event": "asked"}, started, age_s=7200)
        with pytest.raises(ProviderError, match="offers has 1 x no such model"):
            rent(run, url, "--max-hours", "1", "--gpu", "no such model")


# A machine that was started just now is not taken for one that ended, although the list does not have it yet.
def test_not_listed_yet(run, capsys):
    record = RentalRecord(run)
    write(record, {"event": "asked"}, {"event": "started", "instance_id": "pod7"}, age_s=10)
    with service(FakeRunPod().answer) as url:
        assert main(["--run", str(run), "--status"], {"runpod": RunPod(url)}) == 0
    assert record.rentals()[0].open
    assert "not listed yet" in capsys.readouterr().out


# A list that fails is told at once. A missing key ends only its own provider's stop, at once, after the others'.
def test_stop_troubles(run, capsys):
    account, record = FakeRunPod(), RentalRecord(run)
    account.pods["pod7"] = "composer-a1-0"
    account.list_errors = 1
    write(record, {"event": "asked"}, {"event": "asked", "label": "composer-a1-1", "provider": "lambda"}, age_s=7200)
    with service(account.answer) as url, service(lambda path, body: (200, LAMBDA_KINDS)) as lambda_url:
        providers = {"runpod": RunPod(url), "lambda": Lambda(lambda_url)}
        with pytest.raises(ProviderLoginError):
            RentedMachines(providers["lambda"], record, print).stop()
        with pytest.raises(ProviderError, match=r"\$LAMBDA_API_KEY is not set"):
            main(["--run", str(run), "--stop"], providers)
    assert account.pods == {}
    shown = capsys.readouterr().out
    assert "the machines of runpod cannot be listed now: `POST" in shown and "(HTTP 503): try again" in shown


# Neither --status nor --stop needs the run's id. A provider that cannot be asked hides no other's machines.
def test_status_troubles(run, capsys):
    account, record = FakeRunPod(), RentalRecord(run)
    account.pods["pod7"] = "composer-a1-0"
    (run / "run_id").unlink()
    with service(account.answer) as url:
        providers = {"runpod": RunPod(url), "lambda": Lambda(url)}
        with pytest.raises(ConfigError, match="is not a run directory"):
            main(["--run", str(run), "--status"], providers)
        write(record, {"event": "asked"}, {"event": "asked", "label": "composer-a1-1", "provider": "lambda"}, age_s=60)
        with pytest.raises(ProviderError, match=r"\$LAMBDA_API_KEY is not set"):
            main(["--run", str(run), "--status"], providers)
    shown = capsys.readouterr().out
    assert "  running\n" in shown and "  not known now: counts as billed\n" in shown
    assert "billed now: 2 machines, $4.00 an hour" in shown


# A watch stops the machine of a node that was sent away some minutes ago, keeps the others, and ends after the run. A
# read of its metrics may fail meanwhile, and the process that serves its weights may write on.
def test_watch_over_use(run):
    account, said = FakeRunPod(), []
    metrics, minute = run / "metrics.jsonl", 60.0

    def note(minutes_ago: float, **line: Any) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": 1, "time": time.time() - minutes_ago * minute, **line}) + "\n")

    class ThenEnds(RunUse):
        reads = 0

        def update(self) -> None:
            self.reads += 1
            if self.reads == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            super().update()
            if len(account.pods) == 1:
                note(11, event="ended", state="finished")
                note(10, role="weights")
                self._begun -= 11 * minute

    with service(account.answer) as url:
        rented = RentedMachines(RunPod(url), RentalRecord(run), said.append, poll_s=0.01)
        rented.start([OFFER] * 3, 3, "a1", orders, RentalBudget())
        drained, banned, serving = (rental.label for rental in rented.rentals())
        note(30, event="ended", state="failed")
        note(20, event="resume")
        note(15, node=drained, **{"node/state": "draining"})
        note(12, node=drained, **{"node/state": "away"})
        note(12, node=banned, **{"node/state": "banned"})
        note(12, node=f"{banned}-1", **{"node/state": "evicted"})
        note(12, node=serving, **{"node/state": "away"})
        account.list_errors = 1
        assert rented.watch(RentalBudget(hours=5), ThenEnds(run)) == "the run ended (finished) 11 minutes ago"
    assert list(account.pods.values()) == [serving]
    assert f"{drained} has no use: its node was drained 12 minutes ago" in said
    assert f"{banned} has no use: its node was evicted 12 minutes ago" in said
    assert ["Stale file handle" in line for line in said if "still billed" in line] == [True, False]


# What serves, was sent away just now or in part, or came back, keeps its machine; a run that goes on does too, and one
# that ended before the watch has time to be resumed.
@pytest.mark.parametrize(
    "lines",
    [
        [("a", "serving", 20)],
        [("a", "draining", 5), ("a", "away", 4)],
        [("a", "evicted", 20), ("a-1", "serving", 20)],
        [("a", "draining", 20), ("a", "away", 19), ("a", "serving", 18)],
        [("ab", "evicted", 20)],
        [],
    ],
)
def test_machines_in_use(lines, tmp_path):
    now = time.time()
    entries = [{"step": 1, "time": now - 60 * ago, "node": name, "node/state": state} for name, state, ago in lines]
    entries.append({"step": 1, "time": now - 9000, "event": "ended", "state": "finished"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    use = RunUse(tmp_path)
    use.update()
    assert use.unused("a", now) is None and use.over(now) is None


# `--stop` with labels ends these machines only, and refuses one that was not rented.
def test_stop_by_label(run, capsys):
    account = FakeRunPod()
    with service(account.answer) as url:
        providers = {"runpod": RunPod(url)}
        assert rent(run, url, count=2) == 0
        first, second = (rental.label for rental in RentalRecord(run).rentals())
        with pytest.raises(ConfigError, match=f"has no machine 'b'; those that may be billed: {first}, {second}"):
            main(["--run", str(run), "--stop", "b"], providers)
        assert main(["--run", str(run), "--stop", first], providers) == 0
    assert list(account.pods.values()) == [second]
    assert [rental.open for rental in RentalRecord(run).rentals()] == [False, True]
    assert f"runpod lists none of {first}: they are not billed any more" in capsys.readouterr().out


# Without --run it must be clear which run is meant.
def test_no_live_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run below outputs is live on this machine: name the run directory"):
        main(["--stop"])
