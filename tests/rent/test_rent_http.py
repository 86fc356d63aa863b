"""`orchestrator rent` with RunPod and Lambda, against servers on loopback that stand in for their services."""

from __future__ import annotations

from typing import Any

import pytest
from provider_answers import LAMBDA_KINDS, RUNPOD_OFFERS, lambda_instance, new_invite, service

from composer_prime.errors import ProviderError
from orchestrator.rent.command import main
from orchestrator.rent.http_providers import Lambda, RunPod

INVITE = new_invite().text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, with keys in the environment."""
    (tmp_path / "run_id").write_text("a1-12345678\n")
    monkeypatch.setenv("RUNPOD_API_KEY", "right-key")
    monkeypatch.setenv("LAMBDA_API_KEY", "right-key")
    return tmp_path


# Two RunPod pods are started, listed with their price, and terminated; the invite is in the pods' environment only.
def test_runpod(run, capsys):
    pods: dict[str, dict[str, Any]] = {}

    def answer(path: str, body: Any) -> tuple[int, Any]:
        query, variables = body["query"], body["variables"]
        if "gpuTypes" in query:
            return 200, RUNPOD_OFFERS
        if "podFindAndDeployOnDemand" in query:
            wanted = variables["input"]
            pod = {"id": f"pod{len(pods)}", "name": wanted["name"], "desiredStatus": "RUNNING", "costPerHr": 0.34}
            pods[pod["id"]] = pod
            return 200, {"data": {"podFindAndDeployOnDemand": pod}}
        if "podTerminate" in query:
            del pods[variables["podId"]]
            return 200, {"data": {"podTerminate": None}}
        return 200, {"data": {"myself": {"pods": list(pods.values())}}}

    with service(answer) as url:
        providers = {"runpod": RunPod(url)}
        words = ["--run", str(run), "--provider", "runpod", "--gpu", "RTX 4090", "--count", "2", "--max-price", "0.5"]
        assert main([*words, "--invite", INVITE, "--package", "a.whl", "--yes"], providers) == 0
        assert len(pods) == 2
        assert main(["--run", str(run), "--status"], providers) == 0
        assert main(["--run", str(run), "--stop"], providers) == 0
        assert pods == {}
        shown = capsys.readouterr().out
        assert "2 machines of runpod: $0.68 an hour" in shown
        assert "billed now: 2 machines, $0.68 an hour" in shown
        assert INVITE not in shown + (run / "rentals.jsonl").read_text()


# A Lambda machine is billed until the list has it as terminated, however long it is terminating.
def test_lambda(run):
    machines: dict[str, dict[str, Any]] = {}
    lists_after_stop = 0

    def answer(path: str, body: Any) -> tuple[int, Any]:
        nonlocal lists_after_stop
        if path == "/instance-types":
            return 200, LAMBDA_KINDS
        if path == "/instance-operations/launch":
            machines["0920"] = lambda_instance("0920", body["name"], "booting")
            return 200, {"data": {"instance_ids": ["0920"]}}
        if path == "/instance-operations/terminate":
            machines["0920"]["status"] = "terminating"
            return 200, {"data": {"terminated_instances": list(machines.values())}}
        if any(machine["status"] == "terminating" for machine in machines.values()):
            lists_after_stop += 1
            if lists_after_stop == 2:
                machines["0920"]["status"] = "terminated"
        return 200, {"data": list(machines.values())}

    with service(answer) as url:
        providers = {"lambda": Lambda(url)}
        words = ["--run", str(run), "--provider", "lambda", "--gpu", "H100", "--count", "1", "--max-price", "2.5"]
        assert main([*words, "--ssh-key", "my-key", "--invite", INVITE, "--package", "a.whl", "--yes"], providers) == 0
        assert machines["0920"]["status"] == "booting"
        assert main(["--run", str(run), "--stop"], providers) == 0
        assert machines["0920"]["status"] == "terminated"


# A wrong key is refused with the provider's text and the way to a right one; without a key no call is made.
def test_keys(run, monkeypatch):
    words = ["--run", str(run), "--provider", "lambda", "--count", "1", "--max-price", "9", "--ssh-key", "k"]
    with service(lambda path, body: (200, LAMBDA_KINDS)) as url:
        monkeypatch.setenv("LAMBDA_API_KEY", "wrong-key")
        with pytest.raises(ProviderError, match=r"HTTP 401.*API key is invalid.*export a key of https://cloud.lambda"):
            main([*words, "--invite", INVITE, "--package", "a.whl", "--yes"], {"lambda": Lambda(url)})
        monkeypatch.delenv("LAMBDA_API_KEY")
        with pytest.raises(ProviderError, match=r"\$LAMBDA_API_KEY is not set: export a key"):
            main([*words, "--invite", INVITE, "--package", "a.whl", "--yes"], {"lambda": Lambda(url)})


# An error of the service is shown in its own words.
def test_refused(run, capsys):
    error = {"error": {"code": "global/quota-exceeded", "message": "Quota exceeded.", "suggestion": "Contact Support."}}

    def answer(path: str, body: Any) -> tuple[int, Any]:
        if path == "/instance-types":
            return 200, LAMBDA_KINDS
        return (200, {"data": []}) if path == "/instances" else (400, error)

    class Quick(Lambda):
        pause_s = 0.0

    with service(answer) as url:
        words = ["--run", str(run), "--provider", "lambda", "--count", "1", "--max-price", "9", "--ssh-key", "k"]
        assert main([*words, "--invite", INVITE, "--package", "a.whl", "--yes"], {"lambda": Quick(url)}) == 1
    shown = capsys.readouterr().out
    assert "Quota exceeded." in shown
    assert "0 of 1 machines were started" in shown
