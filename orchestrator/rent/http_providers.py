"""RunPod and Lambda, through their documented HTTP interfaces. Both need one key in the environment.

RunPod: the GraphQL interface (https://docs.runpod.io/sdks/graphql/manage-pods); its command `runpodctl` tells no
prices, and makes the same calls. Lambda: the Cloud API 1.8.3 (https://docs-api.lambda.ai/api/cloud).
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from datetime import UTC
from typing import Any, ClassVar

from composer_prime.errors import ProviderError, ProviderRefusedError
from orchestrator.rent.calls import Login, ProviderCall, json_of
from orchestrator.rent.provider import Instance, Needs, Offer, Order, Provider, field_of

_CLOUDS = {"secure": "SECURE", "community": "COMMUNITY"}

_OFFERS = """query Offers($secure: GpuLowestPriceInput, $community: GpuLowestPriceInput) { gpuTypes {
  id displayName memoryInGb
  secure: lowestPrice(input: $secure) { uninterruptablePrice stockStatus }
  community: lowestPrice(input: $community) { uninterruptablePrice stockStatus } } }"""
_START = """mutation Start($input: PodFindAndDeployOnDemandInput!) {
  podFindAndDeployOnDemand(input: $input) { id name desiredStatus costPerHr } }"""
_LIST = "query List { myself { pods { id name desiredStatus costPerHr } } }"
_STOP = "mutation Stop($podId: String!) { podTerminate(input: {podId: $podId}) }"

_UNPACK = "bash -c 'echo $COMPOSER_SCRIPT | base64 -d | gunzip | bash'"


class RunPod(Provider):
    """https://runpod.io: a pod runs the script as its container's command, and can end at a given time by itself."""

    name: ClassVar[str] = "runpod"
    login: ClassVar[Login] = Login(remedy="export a key of https://console.runpod.io/user/settings as RUNPOD_API_KEY")
    default_image: ClassVar[str | None] = "runpod/pytorch:1.0.3-cu1281-torch291-ubuntu2404"
    ends_by_itself: ClassVar[bool] = True

    def __init__(self, url: str = "https://api.runpod.io/graphql") -> None:
        self.url = url

    def offers_call(self, needs: Needs) -> ProviderCall:
        wanted = {"gpuCount": needs.gpus, "totalDisk": needs.disk_gb}
        return self._call(
            _OFFERS, {"secure": {**wanted, "secureCloud": True}, "community": {**wanted, "secureCloud": False}}
        )

    def read_offers(self, answer: str, needs: Needs) -> list[Offer]:
        return [
            Offer(
                offer_id=str(kind["id"]),
                gpu=str(kind.get("displayName") or kind["id"]),
                gpus=needs.gpus,
                gpu_memory_gb=kind.get("memoryInGb"),
                disk_gb=None,
                usd_per_hour=float(price["uninterruptablePrice"]),
                place=f"{cloud} cloud, stock {price.get('stockStatus') or 'unknown'}",
                stock=None,
                terms=(("cloudType", _CLOUDS[cloud]),),
            )
            for kind in field_of(self._data(answer), "gpuTypes", "RunPod's GPU types")
            for cloud in _CLOUDS
            if (price := kind.get(cloud)) and price.get("uninterruptablePrice") and kind.get("id") != "unknown"
        ]

    def start_call(self, offer: Offer, order: Order) -> ProviderCall:
        wanted: dict[str, Any] = {
            **dict(offer.terms),
            "gpuTypeId": offer.offer_id,
            "gpuCount": offer.gpus,
            "name": order.label,
            "imageName": order.image or self.default_image,
            "containerDiskInGb": order.disk_gb,
            "volumeInGb": 0,
            "startSsh": True,
            "dockerArgs": _UNPACK,
            "env": [
                {
                    "key": "COMPOSER_SCRIPT",
                    "value": base64.b64encode(gzip.compress(order.script.encode(), mtime=0)).decode(),
                }
            ],
        }
        if order.end_at is not None:
            wanted["terminateAfter"] = order.end_at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return self._call(_START, {"input": wanted})

    def read_start(self, answer: str) -> str:
        pod = field_of(self._data(answer), "podFindAndDeployOnDemand", "RunPod's new pod")
        return str(field_of(pod, "id", "RunPod's new pod"))

    def list_call(self) -> ProviderCall:
        return self._call(_LIST, {})

    def read_list(self, answer: str) -> list[Instance]:
        account = field_of(self._data(answer), "myself", "RunPod's pods")
        return [
            Instance(
                instance_id=str(field_of(pod, "id", "RunPod's pods")),
                label=str(pod.get("name") or ""),
                state=str(pod.get("desiredStatus") or "?").lower(),
                usd_per_hour=pod.get("costPerHr"),
                gone=pod.get("desiredStatus") == "TERMINATED",
            )
            for pod in account.get("pods") or []
        ]

    def stop_call(self, instance_id: str) -> ProviderCall:
        return self._call(_STOP, {"podId": instance_id})

    def read_stop(self, answer: str) -> None:
        self._data(answer)

    def _call(self, query: str, variables: Mapping[str, Any]) -> ProviderCall:
        body = {"query": query, "variables": variables}
        return ProviderCall(login=self.login, method="POST", url=self.url, key_variable="RUNPOD_API_KEY", body=body)

    def _data(self, answer: str) -> Any:
        """Return `data` of a GraphQL answer. Raises ProviderError with the first error's message.

        That is a refusal, but for an error inside RunPod: it may come after the pod was made.
        """
        content = json_of(answer, "RunPod")
        if errors := content.get("errors"):
            first: Any = errors[0] if isinstance(errors, list) and isinstance(errors[0], dict) else {"message": errors}
            inside = (first.get("extensions") or {}).get("code") == "INTERNAL_SERVER_ERROR"
            raise (ProviderError if inside else ProviderRefusedError)(f"RunPod: {first.get('message')}")
        return content.get("data")


class Lambda(Provider):
    """https://lambda.ai: a virtual machine that runs the script as its cloud-init user data."""

    name: ClassVar[str] = "lambda"
    login: ClassVar[Login] = Login(
        remedy="export a key of https://cloud.lambda.ai/api-keys/cloud-api as LAMBDA_API_KEY"
    )
    needs_ssh_key: ClassVar[str] = "give the name of a key of https://cloud.lambda.ai/ssh-keys"
    pause_s: ClassVar[float] = 12.0
    """The documented limit: one launch in 12 seconds."""

    def __init__(self, url: str = "https://cloud.lambda.ai/api/v1") -> None:
        self.url = url

    def offers_call(self, needs: Needs) -> ProviderCall:
        return self._call("GET", "instance-types")

    def read_offers(self, answer: str, needs: Needs) -> list[Offer]:
        kinds = field_of(json_of(answer, "Lambda's instance types"), "data", "Lambda's instance types")
        return [
            Offer(
                offer_id=str(field_of(kind, "name", "Lambda's instance types")),
                gpu=str(kind.get("gpu_description") or kind.get("description") or "?"),
                gpus=int(specs.get("gpus") or 0),
                gpu_memory_gb=_memory_of(str(kind.get("gpu_description"))),
                disk_gb=specs.get("storage_gib"),
                usd_per_hour=int(field_of(kind, "price_cents_per_hour", "Lambda's instance types")) / 100,
                place=str(region.get("name")),
                stock=None,
                terms=(("region_name", str(region.get("name"))),),
            )
            for entry in kinds.values()
            for kind in [field_of(entry, "instance_type", "Lambda's instance types")]
            for specs in [kind.get("specs") or {}]
            for region in entry.get("regions_with_capacity_available") or []
        ]

    def start_call(self, offer: Offer, order: Order) -> ProviderCall:
        return self._call(
            "POST",
            "instance-operations/launch",
            {
                **dict(offer.terms),
                "instance_type_name": offer.offer_id,
                "ssh_key_names": [order.ssh_key],
                "name": order.label,
                "user_data": order.script,
            },
        )

    def read_start(self, answer: str) -> str:
        launched = field_of(json_of(answer, "Lambda's launch"), "data", "Lambda's launch")
        return str(field_of(launched, "instance_ids", "Lambda's launch")[0])

    def list_call(self) -> ProviderCall:
        return self._call("GET", "instances")

    def read_list(self, answer: str) -> list[Instance]:
        return [
            Instance(
                instance_id=str(field_of(row, "id", "Lambda's instances")),
                label=str(row.get("name") or ""),
                state=str(row.get("status") or "?"),
                usd_per_hour=row["instance_type"]["price_cents_per_hour"] / 100 if row.get("instance_type") else None,
                gone=row.get("status") in ("terminated", "preempted"),
            )
            for row in field_of(json_of(answer, "Lambda's instances"), "data", "Lambda's instances")
        ]

    def stop_call(self, instance_id: str) -> ProviderCall:
        return self._call("POST", "instance-operations/terminate", {"instance_ids": [instance_id]})

    def read_stop(self, answer: str) -> None:
        ended = field_of(json_of(answer, "Lambda's terminate"), "data", "Lambda's terminate")
        if not ended.get("terminated_instances"):
            raise ProviderError(f"Lambda's terminate: nothing was terminated: {ended}")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ProviderCall:
        url = f"{self.url}/{path}"
        return ProviderCall(login=self.login, method=method, url=url, key_variable="LAMBDA_API_KEY", body=body)


def _memory_of(description: str) -> float | None:
    """Return 80 for `H100 (80 GB SXM5)`."""
    size = re.search(r"(\d+) GB", description)
    return float(size[1]) if size else None
