"""Answers in the form of the four providers, cut to the fields that matter and a few that do not.

Vast: `vastai search offers --raw` prints the rows of /api/v0/bundles/ (vastai/data/offer.py of vast-ai/vast-cli).
Prime: `prime availability list --output json` (_format_availability_for_display of PrimeIntellect-ai/prime-cli).
RunPod: the GraphQL specification, https://graphql-spec.runpod.io. Lambda: the OpenAPI document of the Cloud API 1.8.3.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from composer_prime.wire.enrollment import PROTOCOL, Invite, release

Answer = Callable[[str, Any], tuple[int, Any]]


@contextmanager
def service(answer: Answer) -> Iterator[str]:
    """Serve `answer(path, body)` -> (status, JSON or text) and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            if self.headers["Authorization"] != "Bearer right-key":
                status, content = 401, {"error": {"code": "global/invalid-api-key", "message": "API key is invalid."}}
            else:
                status, content = answer(self.path, body)
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def new_invite(*, run_id: str = "a1-12345678", expires_s: float = 3600.0) -> Invite:
    """Return an invite that no registry knows."""
    key = bytes(range(32))
    return Invite(
        addresses=["198.51.100.2:5500"],
        server=key,
        secret=key,
        verify_key=key,
        run_id=run_id,
        release=release(),
        protocol=PROTOCOL,
        expires=int(time.time() + expires_s),
    )


def vast_offer(number: int, price: float, *, gpu: str = "H100 SXM", reliability: float = 0.99) -> dict[str, Any]:
    return {
        "id": number,
        "ask_contract_id": number,
        "machine_id": number + 7,
        "num_gpus": 1,
        "gpu_name": gpu,
        "gpu_ram": 81559,
        "cuda_max_good": 13.0,
        "disk_space": 812.4,
        "dph_base": price - 0.01,
        "dph_total": price,
        "reliability2": reliability,
        "geolocation": "Sweden, SE",
        "rentable": True,
    }


PRIME_OFFERS = json.dumps(
    {
        "gpu_resources": [
            {
                "id": "3fa1c2",
                "cloud_id": "NVIDIA A100 80GB PCIe",
                "gpu_type": "A100 80GB",
                "gpu_count": 1,
                "socket": "PCIe",
                "provider": "runpod",
                "location": "US",
                "stock_status": "Low",
                "price_per_hour": "$1.66",
                "price_value": 1.6567999999999998,
                "security": "datacenter",
                "vcpus": "14",
                "memory_gb": "125",
                "disk_gb": "120+",
                "gpu_memory": 80,
                "is_spot": None,
            },
            {
                "id": "9b11aa",
                "cloud_id": "gpu_1x_h100_pcie",
                "gpu_type": "H100 80GB",
                "gpu_count": 1,
                "socket": "PCIe",
                "provider": "lambdalabs",
                "location": "US",
                "stock_status": "Available",
                "price_per_hour": "$2.49",
                "price_value": 2.49,
                "security": "datacenter",
                "vcpus": "26",
                "memory_gb": "200",
                "disk_gb": "1024",
                "gpu_memory": 80,
                "is_spot": False,
            },
            {
                "id": "77cc00",
                "cloud_id": "spot",
                "gpu_type": "H100 80GB (Spot)",
                "gpu_count": 1,
                "provider": "primecompute",
                "location": "US",
                "stock_status": "Available",
                "price_value": 1.1,
                "vcpus": "None",
                "memory_gb": "None",
                "disk_gb": "500",
                "gpu_memory": 80,
                "is_spot": True,
            },
        ],
        "total_count": 3,
        "filters": {"gpu_type": None, "gpu_count": 1, "regions": None, "socket": None, "provider": None},
    }
)

PRIME_PODS = json.dumps(
    {
        "pods": [
            {
                "id": "c5b8e3a9d0f14f6e8a7b6c5d4e3f2a1b",
                "name": "composer-a1-0a1b2c3d",
                "gpu": "H100_80GB x1",
                "status": "INSTALLING",
                "created_at": "2026-11-23T06:00:00Z",
            }
        ],
        "total_count": 1,
        "offset": 0,
        "limit": 1000,
    }
)

PRIME_CREATED = """
Pod Configuration Summary:
name: composer-a1-0a1b2c3d
gpuCount: 1
provider: lambdalabs
team: None

Successfully created pod c5b8e3a9d0f14f6e8a7b6c5d4e3f2a1b

Use 'prime pods status c5b8e3a9d0f14f6e8a7b6c5d4e3f2a1b' to check the pod status
"""

RUNPOD_OFFERS = json.dumps(
    {
        "data": {
            "gpuTypes": [
                {
                    "id": "NVIDIA H100 80GB HBM3",
                    "displayName": "H100 SXM",
                    "memoryInGb": 80,
                    "secure": {"uninterruptablePrice": 2.69, "stockStatus": "Medium"},
                    "community": {"uninterruptablePrice": None, "stockStatus": None},
                },
                {
                    "id": "NVIDIA GeForce RTX 4090",
                    "displayName": "RTX 4090",
                    "memoryInGb": 24,
                    "secure": {"uninterruptablePrice": 0.69, "stockStatus": "High"},
                    "community": {"uninterruptablePrice": 0.34, "stockStatus": "Low"},
                },
                {"id": "unknown", "displayName": "unknown", "memoryInGb": 0, "secure": None, "community": None},
            ]
        }
    }
)

LAMBDA_KINDS = json.dumps(
    {
        "data": {
            "gpu_1x_gh200": {
                "instance_type": {
                    "name": "gpu_1x_gh200",
                    "description": "1x GH200 (96 GB)",
                    "gpu_description": "GH200 (96 GB)",
                    "price_cents_per_hour": 149,
                    "specs": {"vcpus": 64, "memory_gib": 432, "storage_gib": 4096, "gpus": 1},
                },
                "regions_with_capacity_available": [],
            },
            "gpu_1x_h100_pcie": {
                "instance_type": {
                    "name": "gpu_1x_h100_pcie",
                    "description": "1x H100 (80 GB PCIe)",
                    "gpu_description": "H100 (80 GB PCIe)",
                    "price_cents_per_hour": 249,
                    "specs": {"vcpus": 26, "memory_gib": 225, "storage_gib": 1024, "gpus": 1},
                },
                "regions_with_capacity_available": [
                    {"name": "us-west-3", "description": "Utah, USA"},
                    {"name": "us-south-2", "description": "North Texas, USA"},
                ],
            },
        }
    }
)


def lambda_instance(instance_id: str, name: str, status: str) -> dict[str, Any]:
    return {
        "id": instance_id,
        "name": name,
        "ip": "198.51.100.2",
        "status": status,
        "ssh_key_names": ["my-key"],
        "file_system_names": [],
        "region": {"name": "us-west-3", "description": "Utah, USA"},
        "instance_type": json.loads(LAMBDA_KINDS)["data"]["gpu_1x_h100_pcie"]["instance_type"],
        "actions": {},
    }
