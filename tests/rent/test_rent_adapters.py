"""What each adapter calls, and what it reads from the provider's documented answers. No call is made here."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from provider_answers import (
    LAMBDA_KINDS,
    PRIME_CREATED,
    PRIME_OFFERS,
    PRIME_PODS,
    RUNPOD_OFFERS,
    lambda_instance,
    vast_offer,
)

from composer_prime.errors import ProviderError
from orchestrator.rent.cli_providers import Prime, Vast
from orchestrator.rent.command import PROVIDERS
from orchestrator.rent.http_providers import Lambda, RunPod
from orchestrator.rent.provider import Needs, Offer, Order, choose

H100 = Needs(gpu="H100", max_price=2.5)
ORDER = Order(label="composer-a1-0a1b2c3d", script="#!/bin/bash\ntrue\n", disk_gb=100, ssh_key="key")


def offer(price: float, **values) -> Offer:
    defaults = {"offer_id": str(price), "gpu": "H100 SXM", "gpus": 1, "gpu_memory_gb": 80.0, "disk_gb": 500.0}
    return Offer(**{**defaults, "usd_per_hour": price, **values})


# The cheapest fitting offers come first, one for each machine, and the affordable others are spare.
def test_cheapest():
    offers = [offer(2.4), offer(1.9), offer(2.6), offer(1.5, gpu="A100 SXM4"), offer(1.0, disk_gb=50.0), offer(2.0)]
    assert [taken.usd_per_hour for taken in choose(offers, H100, 2)] == [1.9, 2.0, 2.4]


# An offer of many machines is taken as often as it is needed, and one whose stock is known no more often than that.
def test_stock():
    assert len(choose([offer(2.0, stock=None)], H100, 8)) == 8
    with pytest.raises(ProviderError, match="2 of 3 machines"):
        choose([offer(2.0, stock=2)], H100, 3)


# A model's name is compared word by word: A10 is not A100, and each provider's way of writing is understood.
@pytest.mark.parametrize("gpu", ["H100 SXM", "NVIDIA H100 80GB HBM3", "H100_80GB", "H100 (80 GB PCIe)"])
def test_gpu_names(gpu):
    assert choose([offer(1.0, gpu=gpu)], H100, 1)
    with pytest.raises(ProviderError, match="none of 1 offers"):
        choose([offer(1.0, gpu=gpu)], Needs(gpu="H10", max_price=2.5), 1)


# Without enough affordable machines the error has the number there is, the limit and the next price.
def test_too_dear():
    with pytest.raises(ProviderError, match=r"1 of 2 machines .* at most \$2.50 an hour; the next costs \$2.80"):
        choose([offer(2.8), offer(2.0), offer(9.0)], H100, 2)


# Vast's search terms have the needs, and its rows become offers with the memory in GB.
def test_vast_offers():
    words = Vast().offers_call(Needs(gpu="RTX 4090", gpu_memory_gb=24, disk_gb=120, max_price=1)).words
    assert words[:3] == ("vastai", "search", "offers")
    assert words[3].startswith("num_gpus=1 disk_space>=120 reliability>=0.95 cuda_vers>=13.0 gpu_ram>=24")
    assert "gpu_name in [RTX_4090,RTX_4090_PCIE," in words[3]
    assert words[words.index("--storage") + 1] == "120"
    [found] = Vast().read_offers(json.dumps([vast_offer(4711, 2.1)]), H100)
    assert (found.offer_id, found.usd_per_hour, found.reliability) == ("4711", 2.1, 0.99)
    assert found.gpu_memory_gb == pytest.approx(81.559)


# Vast gets the script, which holds the invite, on stdin and packed; a refusal is an error with Vast's text.
def test_vast_start():
    call = Vast().start_call(offer(2.0, offer_id="4711"), ORDER)
    assert call.words[:4] == ("vastai", "create", "instance", "4711")
    assert call.words[call.words.index("--onstart") + 1] == "/dev/stdin"
    assert gzip.decompress(base64.b64decode(call.stdin.split()[1])).decode() == ORDER.script
    assert Vast().read_start('{"success": true, "new_contract": 7835610}') == "7835610"
    with pytest.raises(ProviderError, match="no_such_ask"):
        Vast().read_start('{"success": false, "msg": "no_such_ask Instance type not found"}')


# A machine that Vast still provisions has no status yet, and is billed for its disk: it counts as there.
def test_vast_list():
    [instance] = Vast().read_list('[{"id": 12, "label": "a", "actual_status": null, "dph_total": 2.1}]')
    assert (instance.instance_id, instance.state, instance.gone) == ("12", "provisioning", False)


# Prime's spot machines are left out, and every size that its command would ask for is given.
def test_prime():
    offers = Prime().read_offers(PRIME_OFFERS, H100)
    assert [found.offer_id for found in offers] == ["3fa1c2", "9b11aa"]
    growing, fixed = (Prime().start_call(found, ORDER).words for found in offers)
    assert growing[growing.index("--disk-size") + 1] == "100"
    assert fixed[fixed.index("--disk-size") + 1] == "1024"
    assert fixed[fixed.index("--memory") + 1] == "200"
    assert Prime().read_start(PRIME_CREATED) == "c5b8e3a9d0f14f6e8a7b6c5d4e3f2a1b"
    [pod] = Prime().read_list(PRIME_PODS)
    assert (pod.label, pod.state) == ("composer-a1-0a1b2c3d", "installing")
    with pytest.raises(ProviderError, match="Pod creation cancelled"):
        Prime().read_start("Pod creation cancelled")


# A pod is set up once it is active and has an address; the script goes over stdin, not into the command line.
def test_prime_setup():
    assert Prime().setup_call('{"status": "PROVISIONING", "ssh": "N/A"}', ORDER) is None
    assert Prime().setup_call('{"status": "ACTIVE", "ssh": "N/A"}', ORDER) is None
    call = Prime().setup_call('{"status": "ACTIVE", "ssh": "root@198.51.100.7 -p 1234"}', ORDER)
    assert call is not None
    assert call.words[-5:-1] == ("key", "-p", "1234", "root@198.51.100.7")
    assert call.stdin == ORDER.script and ORDER.script not in call.words


# Host keys of pods go to a file of the run, each under the pod's own name: pods get addresses that others had.
def test_prime_host_keys():
    order = replace(ORDER, known_hosts=Path("/runs/50% off/rentals.known_hosts"))
    call = Prime().setup_call('{"status": "ACTIVE", "ssh": "root@198.51.100.7 -p 1234"}', order)
    assert call is not None
    assert 'UserKnownHostsFile="/runs/50%% off/rentals.known_hosts"' in call.words
    assert f"HostKeyAlias={ORDER.label}" in call.words


# RunPod's prices are of two clouds; the start names the cloud and the time at which RunPod ends it, and has the script.
def test_runpod():
    offers = RunPod().read_offers(RUNPOD_OFFERS, Needs(max_price=1))
    assert [(found.gpu, found.usd_per_hour) for found in offers] == [
        ("H100 SXM", 2.69),
        ("RTX 4090", 0.69),
        ("RTX 4090", 0.34),
    ]
    order = Order(label="a", script="true\n", disk_gb=80, end_at=datetime(2026, 11, 24, 6, tzinfo=UTC))
    body = RunPod().start_call(offers[2], order).body
    assert body is not None
    wanted = body["variables"]["input"]
    assert (wanted["cloudType"], wanted["gpuTypeId"]) == ("COMMUNITY", "NVIDIA GeForce RTX 4090")
    assert wanted["terminateAfter"] == "2026-11-24T06:00:00Z"
    assert gzip.decompress(base64.b64decode(wanted["env"][0]["value"])) == b"true\n"
    with pytest.raises(ProviderError, match="no longer any instances available"):
        RunPod().read_start('{"errors": [{"message": "There are no longer any instances available"}], "data": null}')


# Only regions with capacity are on offer at Lambda; the request has the fields that its specification requires.
def test_lambda():
    offers = Lambda().read_offers(LAMBDA_KINDS, H100)
    assert [(found.place, found.usd_per_hour, found.gpu_memory_gb) for found in offers] == [
        ("us-west-3", 2.49, 80.0),
        ("us-south-2", 2.49, 80.0),
    ]
    body = Lambda().start_call(offers[0], ORDER).body
    assert body == {
        "region_name": "us-west-3",
        "instance_type_name": "gpu_1x_h100_pcie",
        "ssh_key_names": ["key"],
        "name": ORDER.label,
        "user_data": ORDER.script,
    }
    listed = json.dumps({"data": [lambda_instance("a", "x", "terminating"), lambda_instance("b", "y", "terminated")]})
    assert [instance.gone for instance in Lambda().read_list(listed)] == [False, True]
    with pytest.raises(ProviderError, match="nothing was terminated"):
        Lambda().read_stop('{"data": {"terminated_instances": []}}')


# An answer that is cut short or lacks its id is an error that shows the answer, for every provider.
@pytest.mark.parametrize("provider", PROVIDERS.values(), ids=PROVIDERS)
@pytest.mark.parametrize("answer", ["", '{"data": {"my', "17", '{"success": true}', '[{"id": null}]'])
def test_bad_answers(provider, answer):
    for read in (lambda text: provider.read_offers(text, H100), provider.read_start, provider.read_list):
        with pytest.raises(ProviderError):
            read(answer)
