"""Vast.ai and Prime Intellect, through their own command-line tools.

Commands and fields are those of vast-ai/vast-cli at 5567983 and PrimeIntellect-ai/prime-cli at bd27b0d.
"""

from __future__ import annotations

import base64
import gzip
import re
from typing import ClassVar

from composer_prime.errors import ProviderError, ProviderRefusedError
from orchestrator.rent.calls import Login, ProviderCall, json_of
from orchestrator.rent.provider import Instance, Needs, Offer, Order, Provider, field_of

CUDA_VERSION = "13.0"
"""What torch's wheels of this release are built for: the host's driver must support it."""

_FORM_FACTORS = ("", "_PCIE", "_SXM", "_SXM4", "_SXM5", "_NVL")
"""How Vast tells kinds of one GPU model apart. Its search compares whole names."""


def packed(script: str) -> str:
    """Return one line of shell that unpacks and runs `script`, a third of its size."""
    return f"echo {base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()} | base64 -d | gunzip | bash\n"


class Vast(Provider):
    """https://vast.ai: each offer is one machine; a start script runs in a container."""

    name: ClassVar[str] = "vast"
    login: ClassVar[Login] = Login(
        install="`uv tool install vastai`",
        remedy="`vastai set api-key KEY`, with a key of https://cloud.vast.ai/manage-keys/",
    )
    default_image: ClassVar[str | None] = "vastai/base-image:@vastai-automatic-tag"

    def offers_call(self, needs: Needs) -> ProviderCall:
        terms = [
            f"num_gpus={needs.gpus}",
            f"disk_space>={needs.disk_gb}",
            f"reliability>={needs.min_reliability:g}",
            f"cuda_vers>={CUDA_VERSION}",
        ]
        if needs.gpu_memory_gb:
            terms.append(f"gpu_ram>={needs.gpu_memory_gb:g}")
        if needs.gpu:
            name = needs.gpu.strip().replace(" ", "_")
            terms.append(f"gpu_name in [{','.join(name + factor for factor in _FORM_FACTORS)}]")
        return self._call(
            "search", "offers", " ".join(terms), "--order", "dph_total", "--limit", "500", "--storage",
            str(needs.disk_gb), "--raw",
        )  # fmt: skip

    def read_offers(self, answer: str, needs: Needs) -> list[Offer]:
        return [
            Offer(
                offer_id=str(field_of(row, "id", "vastai search offers")),
                gpu=str(row.get("gpu_name") or "?"),
                gpus=int(row.get("num_gpus") or 0),
                gpu_memory_gb=row["gpu_ram"] / 1000 if row.get("gpu_ram") else None,
                disk_gb=row.get("disk_space"),
                usd_per_hour=float(field_of(row, "dph_total", "vastai search offers")),
                place=str(row.get("geolocation") or ""),
                reliability=row.get("reliability2", row.get("reliability")),
            )
            for row in json_of(answer, "vastai search offers", list)
        ]

    def start_call(self, offer: Offer, order: Order) -> ProviderCall:
        # The script comes from stdin: it holds a secret, and other users can read command lines.
        return self._call(
            "create", "instance", offer.offer_id, "--image", order.image or str(self.default_image), "--disk",
            str(order.disk_gb), "--label", order.label, "--ssh", "--direct", "--cancel-unavail", "--onstart",
            "/dev/stdin", "--raw", stdin=packed(order.script),
        )  # fmt: skip

    def read_start(self, answer: str) -> str:
        created = json_of(answer, "vastai create instance")
        if not created.get("success"):
            raise ProviderRefusedError(f"vastai create instance: {created.get('msg') or created}")
        return str(field_of(created, "new_contract", "vastai create instance"))

    def list_call(self) -> ProviderCall:
        return self._call("show", "instances", "--raw")

    def read_list(self, answer: str) -> list[Instance]:
        return [
            Instance(
                instance_id=str(field_of(row, "id", "vastai show instances")),
                label=str(row.get("label") or ""),
                state=str(row.get("actual_status") or "provisioning"),
                usd_per_hour=row.get("dph_total"),
            )
            for row in json_of(answer, "vastai show instances", list)
        ]

    def stop_call(self, instance_id: str) -> ProviderCall:
        return self._call("destroy", "instance", instance_id, "--yes", "--raw")

    def read_stop(self, answer: str) -> None:
        ended = json_of(answer, "vastai destroy instance")
        if not ended.get("success"):
            raise ProviderError(f"vastai destroy instance: {ended.get('msg') or ended}")

    def _call(self, *words: str, stdin: str = "") -> ProviderCall:
        return ProviderCall(login=self.login, words=("vastai", *words), stdin=stdin)


class Prime(Provider):
    """https://app.primeintellect.ai: a pod is reached over SSH when it is active, and the script is run there."""

    name: ClassVar[str] = "prime"
    login: ClassVar[Login] = Login(install="`uv tool install prime`", remedy="`prime login`")
    default_image: ClassVar[str | None] = "ubuntu_22_cuda_12"

    def offers_call(self, needs: Needs) -> ProviderCall:
        return self._call(
            "availability", "list", "--gpu-count", str(needs.gpus), "--no-group-similar", "--output", "json"
        )

    def read_offers(self, answer: str, needs: Needs) -> list[Offer]:
        rows = field_of(json_of(answer, "prime availability list"), "gpu_resources", "prime availability list")
        return [
            Offer(
                offer_id=str(field_of(row, "id", "prime availability list")),
                gpu=str(row.get("gpu_type") or "?"),
                gpus=int(row.get("gpu_count") or 0),
                gpu_memory_gb=row.get("gpu_memory"),
                disk_gb=_most_disk(str(row.get("disk_gb"))),
                usd_per_hour=float(field_of(row, "price_value", "prime availability list")),
                place=f"{row.get('provider')}, {row.get('location')}",
                stock=None,
                terms=tuple((key, str(row.get(key))) for key in ("vcpus", "memory_gb", "disk_gb")),
            )
            for row in rows
            if row.get("stock_status") != "Unavailable" and not row.get("is_spot")
        ]

    def start_call(self, offer: Offer, order: Order) -> ProviderCall:
        # Every value that is not given here would be asked for.
        terms = dict(offer.terms)
        disk = terms.get("disk_gb", "")
        sizes = {"--vcpus": terms.get("vcpus", ""), "--memory": terms.get("memory_gb", "")}
        sizes["--disk-size"] = str(order.disk_gb) if disk.endswith("+") else disk
        return self._call(
            "pods", "create", "--id", offer.offer_id, "--name", order.label,
            "--image", order.image or str(self.default_image),
            *(word for flag, value in sizes.items() if value.isdigit() for word in (flag, value)), "--yes",
        )  # fmt: skip

    def read_start(self, answer: str) -> str:
        created = re.search(r"Successfully created pod (\S+)", answer)
        if created is None:
            raise ProviderError(f"prime pods create: no pod was created: {answer.strip()[-500:]}")
        return created[1]

    def list_call(self) -> ProviderCall:
        return self._call("pods", "list", "--limit", "1000", "--output", "json")

    def read_list(self, answer: str) -> list[Instance]:
        return [
            Instance(
                instance_id=str(field_of(row, "id", "prime pods list")),
                label=str(row.get("name") or ""),
                state=str(row.get("status") or "?").lower(),
                gone=str(row.get("status")).upper() == "TERMINATED",
            )
            for row in field_of(json_of(answer, "prime pods list"), "pods", "prime pods list")
        ]

    def stop_call(self, instance_id: str) -> ProviderCall:
        return self._call("pods", "terminate", instance_id, "--yes")

    def read_stop(self, answer: str) -> None:
        if "Successfully terminated" not in answer:
            raise ProviderError(f"prime pods terminate: {answer.strip()[-500:]}")

    def address_call(self, instance_id: str) -> ProviderCall | None:
        return self._call("pods", "status", instance_id, "--output", "json")

    def setup_call(self, answer: str, order: Order) -> ProviderCall | None:
        status = json_of(answer, "prime pods status")
        place = re.match(r"(\S+@[^\s,]+)(?: -p (\d+))?", str(status.get("ssh") or ""))
        if status.get("status") != "ACTIVE" or place is None:
            return None
        key = ("-i", order.ssh_key) if order.ssh_key else ()
        known: tuple[str, ...] = ()
        if order.known_hosts is not None:
            # Pods get addresses again that others had, with other host keys: each has its own name in the file.
            file = str(order.known_hosts).replace("%", "%%")
            known = ("-o", f'UserKnownHostsFile="{file}"', "-o", f"HostKeyAlias={order.label}")
        # The script outlives the connection.
        command = "umask 077; cat > composer.sh; nohup bash composer.sh > composer.log 2>&1 < /dev/null &"
        return ProviderCall(
            login=self.login,
            words=("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o", "ConnectTimeout=30",
                   *known, *key, "-p", place[2] or "22", place[1], command),
            stdin=order.script,
            silent=True,
        )  # fmt: skip

    def _call(self, *words: str) -> ProviderCall:
        return ProviderCall(login=self.login, words=("prime", *words))


def _most_disk(shown: str) -> float | None:
    """Return the size of a fixed disk in GB; None for `120+`, which can be larger, and if it is unknown."""
    return float(shown) if shown.isdigit() else None
