"""A small configuration for a gateway on loopback, invites to it, and plain HTTP calls on it."""

import time
from pathlib import Path
from typing import Any

import aiohttp
import zmq
from zmq.utils import z85

from composer_prime.config import Config
from composer_prime.run.keys import RunKeys
from composer_prime.wire.enrollment import Invite, release
from composer_prime.wire.node_messages import PROTOCOL
from tests.configs_made import config_of

MODEL = Path(__file__).parents[2] / "composer_prime" / "assets" / "tiny" / "policy"
MACHINE = "no GPU, 2 cores"


def config_with(**sections: dict[str, Any]) -> Config:
    """A small configuration; `sections` are merged into its [inference], [orchestrator] and [model]."""
    usual: dict[str, dict[str, Any]] = {
        "model": {"path": str(MODEL)},
        "inference": {"heartbeat_s": 0.1, "lost_after_s": 0.4},
        "orchestrator": {
            "source": [{"name": "s", "taskset": {"id": "orchestrator.environments.toolsmith"}, "timeout_s": 30.0}],
            "no_node_timeout_s": 30.0,
        },
    }
    return config_of(**{name: usual.get(name, {}) | sections.get(name, {}) for name in {**usual, **sections}})


def invite_for(keys: RunKeys, address: str = "127.0.0.1:1", *, uses: int = 1, valid_s: float = 1000.0) -> Invite:
    """An invite that the run has noted."""
    public, secret = zmq.curve_keypair()
    keys.registry.invite(public, uses=uses, expires=time.time() + valid_s)
    return Invite(
        addresses=[address.removeprefix("tcp://")],
        server=z85.decode(keys.curve("server").public),
        secret=z85.decode(secret),
        verify_key=keys.verifier().public_bytes_raw(),
        run_id="run-1",
        release=release(),
        protocol=PROTOCOL,
        expires=int(time.time() + valid_s),
    )


async def post(url: str, body: Any, path: str = "/inference/v1/generate", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}) as reply,
    ):
        return reply.status, await reply.json()


def generate_body(*token_ids: int, **sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": list(token_ids), "sampling_params": {"max_tokens": 16} | sampling}


async def get(url: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.json()
