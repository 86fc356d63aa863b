"""Several gateway processes in front of one router: the same answers, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from gateway_config import MODEL, config_with
from http_calls import generate_body, get, post
from node_peer import PeerNode, tokens_for
from pydantic import ValidationError

from composer_prime.address import HeldPort
from composer_prime.errors import PortInUseError
from composer_prime.wire.frames import Frames
from composer_prime.wire.turns import GATEWAY_TOKEN_VARIABLE, PackedAnswer, TurnClient
from composer_prime.wire.types import ints
from orchestrator.gateway import Gateway
from orchestrator.gateway.chat import ChatFormat
from orchestrator.gateway.generation import SamplingFields, TurnRequest
from orchestrator.gateway.http import HttpServer, state_routes
from orchestrator.gateway.processes import GatewayProcesses, ProcessSettings
from orchestrator.gateway.processes.http_end import RouterLink, forward_route
from orchestrator.gateway.processes.messages import ToProcess

PATIENT = {"heartbeat_s": 0.1, "lost_after_s": 60.0}
ONE = {"inference": PATIENT}
TWO = {"inference": PATIENT, "orchestrator": {"gateway_processes": 2}}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "seed": 5, "max_tokens": 6}
REFUSED = [
    ({"model": "other", "token_ids": [5], "sampling_params": {}}, 404),
    ({"model": "policy", "token_ids": [], "sampling_params": {}}, 400),
    ({"model": "policy", "token_ids": [10**6], "sampling_params": {}}, 400),
    ({"model": "policy", "token_ids": [5] * 600, "sampling_params": {}}, 400),
    ({"model": "policy", "token_ids": [5], "sampling_params": {"min_p": 0.5}}, 400),
    ({"model": "policy", "token_ids": "5", "sampling_params": {}}, 400),
    ({"model": "policy", "token_ids": [5], "sampling_params": {"seed": 2**70}}, 400),
    ({"model": "policy", "token_ids": [5], "sampling_params": {"n": -(2**70)}}, 400),
]


async def ask(client: TurnClient, url: str, session: str | None, body: dict) -> tuple[int, list[int]]:
    """Ask as environment workers do, packed where that is known, by a connection of its own."""

    async def send(data: bytes, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        sent = {**headers, **({} if session is None else {"X-Session-ID": session})}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{url}/inference/v1/generate", data=data, headers=sent) as reply,
        ):
            return reply.status, reply.content_type, await reply.read()

    status, answer = await client.ask(session, body, send)
    assert isinstance(answer, PackedAnswer), answer
    return status, ints(answer.token_ids).tolist()


async def play(gateway: Gateway, session: str, client: TurnClient | None) -> list[list[int]]:
    """Play three turns of a rollout, in JSON without a `client`. Return what each sampled."""
    gateway.records.open(session)
    answers, prompt = [], [5, 6, 7]
    for _ in range(3):
        body = generate_body(*prompt, seed=11)
        if client is None:
            status, reply = await post(gateway.http_url, body, X_Session_ID=session)
            ids = reply["choices"][0]["token_ids"]
        else:
            status, ids = await ask(client, gateway.http_url, session, body)
        assert status == 200
        answers.append(ids)
        prompt = [*prompt, *ids, 9]
    return answers


async def everything(gateway: Gateway, node: PeerNode) -> list:
    """Ask in every form. Return what came back, and what the node was asked."""
    results: list = [await play(gateway, "r0", None), await play(gateway, "r1", TurnClient())]
    chat = await post(gateway.http_url, CHAT, "/v1/chat/completions")
    results.append((chat[0], chat[1]["choices"], chat[1]["usage"]))
    results += [await post(gateway.http_url, body) for body, _ in REFUSED]
    results += [await get(f"{gateway.http_url}{path}") for path in ("/v1/models", "/health", "/nothing")]
    for session in ("r0", "r1"):
        records = gateway.records.take(session)
        results.append([(r.prompt_ids.tolist(), r.completion_ids.tolist(), r.sampling.seed) for r in records])
    results.append([g.sampling for g in node.generates if g.sampling.seed is not None][:6])
    return results


@pytest.mark.process
async def test_two_processes_answer_as_one_does(open_gateway, node_keys):
    """Tokens, records, seeds, errors and every other route are the same, whichever process parsed the request."""
    both = []
    for settings in (ONE, TWO):
        async with (
            open_gateway(**settings) as gateway,
            PeerNode(gateway.node_endpoint, node_keys, "n0") as node,
        ):
            both.append(await everything(gateway, node))
    assert both[0] == both[1]
    assert [status for status, _ in both[1][3 : 3 + len(REFUSED)]] == [status for _, status in REFUSED]


@pytest.mark.process
async def test_a_killed_process_loses_no_turn(open_gateway, node_keys, caplog):
    """The environment workers' client asks again and is answered; the router drops the turns of the dead process, which
    is started again."""
    pytest.importorskip("verifiers.v1")
    from orchestrator.workers.verifiers_compat import GatewayHttp

    async with (
        open_gateway(**TWO) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0", max_concurrent=256, answer=lambda request: None) as node,
    ):
        client = GatewayHttp(gateway.http_url, "")
        (attached,) = gateway.router.nodes.attached()
        attached.speed.note_tokens(1 << 20)  # So that it gets all requests at once.
        gateway.router.placing.update(attached)

        async def rollout(number: int) -> list[int]:
            gateway.records.open(f"r{number}")
            body, headers = generate_body(5, number), {"X-Session-ID": f"r{number}"}
            path = f"{gateway.http_url}/inference/v1/generate"
            reply = await client.post(path, cast_to=None, body=body, options={"headers": headers})
            return json.loads(reply.content)["choices"][0]["token_ids"]

        calls = [asyncio.create_task(rollout(number)) for number in range(40)]
        await node.until(lambda: len(node.running) == 40)
        killed, cancelled = gateway.processes.pids[0], lambda: gateway.router.counters.cancelled
        os.kill(killed, signal.SIGKILL)
        await node.until(lambda: cancelled() > 0 and len(node.generates) == 40 + cancelled())
        await node.until(lambda: len(node.running) == 40)
        assert cancelled() < 40  # The kernel had spread them over both.
        for request in node.generates:
            if request.request_id in node.running:
                node.send(node.usual_answer(request))
        assert await asyncio.gather(*calls) == [tokens_for([5, n], 6)[0].tolist() for n in range(40)]
        assert [len(gateway.records.take(f"r{number}")) for number in range(40)] == [1] * 40
        await client.close()
        await node.until(lambda: gateway.processes.num_serving == 2)
        assert killed not in gateway.processes.pids
        assert "gateway process 0 was ended by SIGKILL" in caplog.text
        assert (await get(f"{gateway.http_url}/metrics"))[1]["processes"] == {"serving": 2, "restarts": 1}


@pytest.mark.process
async def test_a_client_that_hangs_up_reaches_the_router(open_gateway, node_keys):
    """Its request is taken back from the node, and leaves no record."""
    async with (
        open_gateway(**TWO) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0", delay_s=100) as node,
    ):
        gateway.records.open("r1")
        call = asyncio.create_task(post(gateway.http_url, generate_body(5), X_Session_ID="r1"))
        await node.until(lambda: bool(node.running))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await node.until(lambda: not node.running)
        assert gateway.router.in_flight == 0 and gateway.router.counters.cancelled == 1
        assert gateway.records.take("r1") == []


@pytest.mark.process
async def test_open_turns_hear_that_the_gateway_stops(open_gateway, node_keys):
    """They get a 503, as they do from one process, and no process outlives the gateway."""
    async with (
        open_gateway(**TWO) as gateway,
        PeerNode(gateway.node_endpoint, node_keys, "n0", delay_s=100) as node,
    ):
        call = asyncio.create_task(post(gateway.http_url, generate_body(5)))
        await node.until(lambda: bool(node.running))
        pids = gateway.processes.pids
        await gateway.close()
        status, reply = await call
        assert (status, reply["error"]["code"]) == (503, "closing")
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def process_settings(port: int) -> ProcessSettings:
    return ProcessSettings(
        host="127.0.0.1",
        port=port,
        router_url="http://127.0.0.1:9",
        token=None,
        model_names=("policy",),
        model_dir=str(MODEL),
        renderer=None,
        max_context=512,
        answer_timeout_s=30.0,
    )


def http_server(
    answer: Callable[[TurnRequest], Awaitable[PackedAnswer]], *others: web.RouteDef
) -> tuple[ChatFormat, HttpServer]:
    chat = ChatFormat(MODEL, None)
    return chat, HttpServer(answer, chat, model_names=("policy",), max_context=512, token=None, others=others)


@pytest.mark.process
async def test_processes_that_hang_are_killed_and_the_last_resort_serves():
    """A stopped process counts as dead. When none may be started again, the router's process serves the port."""

    async def answer(turn: TurnRequest) -> PackedAnswer:
        return PackedAnswer(
            request_id="g0",
            token_ids=turn.new_ids,
            logprobs=b"",
            finish_reason="stop",
            version_spans=[],
            prompt_cached=0,
        )

    errors: list[BaseException] = []
    port = HeldPort("127.0.0.1", 0, shared=True)
    chat, server = http_server(answer)
    processes = GatewayProcesses(2, answer, errors.append, hang_s=10.0, max_restarts=0)
    try:
        await processes.start(process_settings(port.number), partial(server.start, port.socket))
        client = TurnClient()
        assert (await ask(client, port.url, None, generate_body(5, 6)))[1] == [5, 6]
        for pid in processes.pids:
            os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(200):
            while not server.url:
                processes.end_silent()
                await asyncio.sleep(0.02)
        assert (await ask(client, port.url, None, generate_body(5, 7)))[1] == [5, 7]
        assert processes.figures() == {"serving": 0, "restarts": 0}
    finally:
        await processes.close()
        await server.close()
        chat.close()
        port.close()
    assert not errors


@pytest.mark.process
async def test_an_unexpected_error_reads_the_same_from_one_and_several_processes(caplog):
    """The client gets OpenAI's error body without the cause, which the log has. The same holds for other routes."""

    def fail(*_: object) -> Any:
        raise ZeroDivisionError("the cause")

    async def answer(turn: TurnRequest) -> PackedAnswer:
        return fail()

    alone, port = HeldPort("127.0.0.1", 0), HeldPort("127.0.0.1", 0, shared=True)
    chat, server = http_server(answer, *state_routes(token=None, health=fail, metrics=fail))
    errors: list[BaseException] = []
    processes = GatewayProcesses(1, answer, errors.append)
    try:
        await server.start(alone.socket)
        await processes.start(process_settings(port.number), server.close)
        one, several = [await post(held.url, generate_body(5)) for held in (alone, port)]
        assert one == several == await get(f"{alone.url}/health")
        assert (one[0], one[1]["error"]["code"]) == (500, "internal")
        assert "the cause" not in str(one) and caplog.text.count("ZeroDivisionError: the cause") == 3
        assert not errors
    finally:
        await processes.close()
        await server.close()
        chat.close()
        alone.close()
        port.close()


async def test_a_gateway_process_reads_no_body_for_a_route_that_takes_none():
    """Whoever reaches the port would fill its memory, with the token or without. The answer waits for no body."""

    async def answer(turn: TurnRequest) -> PackedAnswer:
        raise AssertionError("no turn is asked for")

    port = HeldPort("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:
        chat, server = http_server(answer, forward_route(session, "http://127.0.0.1:9"))
        try:
            await server.start(port.socket)
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            writer.write(b"POST /health HTTP/1.1\r\nHost: gateway\r\nContent-Length: 1000000000\r\n\r\n")
            assert b" 503 " in await reader.readline()
            head = await reader.readuntil(b"\r\n\r\n")
            body = json.loads(await reader.readuntil(b"}}"))
            assert b"application/json" in head and body["error"]["code"] == "router_unavailable"
            assert body["error"]["message"] == "the router does not answer: ClientConnectorError"
            writer.close()
        finally:
            await server.close()
            chat.close()
            port.close()


async def test_a_turn_that_cannot_be_sent_leaves_nothing_behind():
    """Its error reaches the caller, and nobody waits for an answer."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        frames: Frames[ToProcess] = Frames(reader, writer, ToProcess, "router")
        link = RouterLink(frames, 1.0)
        with pytest.raises(OverflowError):
            await link.answer(TurnRequest(session=None, new_ids=b"", sampling=SamplingFields(seed=2**70)))
        assert not link._waiting
        frames.close()


@pytest.mark.process
async def test_the_token_is_asked_for_by_every_process(open_gateway, node_keys, monkeypatch):
    """Without it no turn is taken, and no state is shown."""
    monkeypatch.setenv(GATEWAY_TOKEN_VARIABLE, "secret")
    async with open_gateway(**TWO) as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0"):
        for _ in range(6):  # By connections of their own, so both processes are met.
            assert (await post(gateway.http_url, generate_body(5)))[0] == 401
        assert (await get(f"{gateway.http_url}/metrics"))[0] == 401
        assert (await post(gateway.http_url, generate_body(5), Authorization="Bearer secret"))[0] == 200
        assert gateway.router.counters.requests == 1


@pytest.mark.skipif(sys.platform != "linux", reason="several processes share a port on Linux only")
@pytest.mark.parametrize("shared", [False, True])
async def test_a_held_port_admits_this_gateways_processes_only(open_gateway, shared):
    """A second run with that port is refused, with one process or several, whether or not the first one listens yet."""
    held = HeldPort("127.0.0.1", 0, shared=shared)
    again = {"gateway_port": held.number}
    refused = rf"{held.number} is held by another process.*orchestrator.gateway_port"

    async def refuse_others() -> None:
        for count in (1, 2):
            with pytest.raises(PortInUseError, match=refused):
                async with open_gateway(orchestrator={**again, "gateway_processes": count}):
                    pass

    await refuse_others()
    if shared:
        with socket.create_server(("127.0.0.1", held.number), reuse_port=True):
            await refuse_others()
    else:
        held.socket.listen()
        await refuse_others()
    held.close()
    async with open_gateway(orchestrator=again) as gateway:
        assert gateway.http_url.endswith(f":{held.number}")


def test_more_processes_than_rollouts_are_refused():
    """The message names both values."""
    with pytest.raises(ValidationError, match=r"gateway_processes is 5, but orchestrator.max_concurrent is 4"):
        config_with(orchestrator={"gateway_processes": 5, "max_concurrent": 4})
    with pytest.raises(ValidationError, match=r"greater than or equal to 1.*input_value=0"):
        config_with(orchestrator={"gateway_processes": 0})
