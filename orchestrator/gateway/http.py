"""The gateway's HTTP server on loopback, and the record of what was sampled.

    POST /inference/v1/generate   token ids in, token ids and logprobs out (verifiers' training client)
    POST /v1/chat/completions     OpenAI, messages and tools
    GET  /v1/models
    /control/...                  for the run's operator (node_control.py)

    request -> HttpServer: check, seed, route -> RolloutRecords -> reply

Every exception of a route gets OpenAI's error body. A client that closes its connection cancels its request. A sampling
parameter that our engines do not have is refused: the recorded logprobs would be of another distribution.

`RolloutRecords` is the source of truth for training tokens. It keeps nothing of rollouts that are not open.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import os
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta

from composer_prime.config.root import ModelConfig
from composer_prime.errors import DeadlineError, EngineError, RequestError
from composer_prime.wire.node_messages import GATEWAY_TOKEN_VARIABLE, POLICY, Answer, Sampling, context_overflow
from composer_prime.wire.types import ints, pack_ints
from orchestrator.gateway.chat import ChatFormat, chat_reply
from orchestrator.gateway.nodes import Placing
from orchestrator.gateway.routing import Router
from orchestrator.swarm import Audits

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MAX_BODY_BYTES = 64 << 20
_MAX_SESSION_CHARACTERS = 256
_BACKLOG = 4096
_SHUTDOWN_S = 2.0
"""For replies on their way. Requests without an answer have ended by then."""
_MAX_STOPS = 64
_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of a prompt that leaves no room."""
_AGENT = re.compile(r"#\d+$")
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Larger integers have no msgpack form, in which nodes get them."""
BodyT = TypeVar("BodyT")


class UnsupportedFields(msgspec.Struct, kw_only=True):
    """Parameters that our engines do not have, with the values that switch them off."""

    n: Int64 | None = 1
    min_p: float | None = 0
    min_tokens: Int64 | None = 0
    presence_penalty: float | None = 0
    frequency_penalty: float | None = 0
    repetition_penalty: float | None = 1
    logit_bias: dict[str, float] | None = {}


class SamplingFields(UnsupportedFields, kw_only=True):
    """None where a request names none."""

    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    """-1 and 0 keep every token."""
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None


_NEUTRAL = UnsupportedFields()


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate."""

    model: str
    token_ids: list[TokenId]
    sampling_params: SamplingFields
    content_parts: Any = None
    features: Any = None
    stream: bool | None = None


class ChatBody(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None


_GENERATE_DECODER = msgspec.json.Decoder(GenerateBody)
_CHAT_DECODER = msgspec.json.Decoder(ChatBody)


class HttpServer:
    """Checks requests, has them answered by nodes, and records the answers."""

    def __init__(
        self,
        router: Router,
        records: RolloutRecords,
        model: ModelConfig,
        model_dir: Path,
        *,
        run_id: str,
        operator_token: str,
        others: Sequence[web.RouteDef],
    ) -> None:
        """`model_dir`: has tokenizer and chat template. `operator_token`: of /control/... `others`: further routes."""
        self._router = router
        self._records = records
        self._chat = ChatFormat(model_dir, model.renderer)
        self._model_names = POLICY, model.path
        self._max_context = model.max_context
        """Prompt and reply together, in tokens."""
        self._token = os.environ.get(GATEWAY_TOKEN_VARIABLE)
        """None for no check."""
        self._operator_token = operator_token
        self._others = others
        self._runner: web.AppRunner | None = None
        # Random: a restart counts requests from 0 again.
        self._seed_text = f"{run_id}/{secrets.token_hex(8)}"
        self._order = itertools.count()
        self._under_way: Counter[str] = Counter()

    @property
    def url(self) -> str:
        addresses = self._runner.addresses if self._runner is not None else []
        return f"http://{_LOOPBACK}:{addresses[0][1]}" if addresses else ""

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/v1/chat/completions", self._chat_complete),
                web.get("/v1/models", self._get_models),
                *self._others,
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, _LOOPBACK, 0, backlog=_BACKLOG).start()

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        self._chat.close()

    # -- routes --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _decoded(request, _GENERATE_DECODER)
        if body.content_parts or body.features:
            raise RequestError("content_parts and features are for images: this model reads text only")
        _check_no_stream(request, body.stream)
        self._check_model(body.model)
        answer = await self._answer(_session(request), pack_ints(body.token_ids), body.sampling_params)
        return json_reply(answer.to_json())

    async def _chat_complete(self, request: web.Request) -> web.Response:
        body = await _decoded(request, _CHAT_DECODER)
        self._check_model(body.model)
        _check_chat(body)
        _check_no_stream(request, body.stream)
        tools = None if body.tool_choice == "none" else body.tools or None
        prompt, stop_ids = await self._chat.render(body.messages, tools)
        body.stop_token_ids = [*(body.stop_token_ids or []), *stop_ids]
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        try:
            answer = await self._answer(_session(request), pack_ints(prompt), body)
        except RequestError as error:
            if error.code != _TOO_LONG:
                raise
            text = f"{error}{await self._chat.parts(body.messages, tools or [])}"
            raise RequestError(text, code=_TOO_LONG, param="messages") from error
        token_ids = answer.ids.tolist()
        message, finish_reason = await self._chat.parse(token_ids, prompt, tools, answer.finish_reason)
        return json_reply(chat_reply(body.model, len(prompt), answer, token_ids, message, finish_reason))

    async def _answer(self, session: str | None, prompt: bytes, fields: SamplingFields) -> Answer:
        """Return the answer to `prompt`, int32 [T], recorded when `session` belongs to an open rollout."""
        order = next(self._order)
        request_id = f"g{order}"
        token_ids = _checked_ids(prompt, self._router.policy.vocab_size)
        rollout = None if session is None else self._records.find(session)
        answer, sent_ids = (None, token_ids) if rollout is None else rollout.repeated(session or "", token_ids)
        sampling = to_sampling(fields, num_prompt=len(sent_ids), max_context=self._max_context)
        name = request_id if session is None else session
        if fields.seed is None:  # An audit must know what a node had to draw.
            sampling = msgspec.structs.replace(sampling, seed=_hashed_seed(f"{self._seed_text}/{request_id}"))
        elif session is not None:  # Parallel requests of one session draw different noise.
            turn = self._under_way[session] + (0 if rollout is None else rollout.answered(session))
            draw = 0 if rollout is None or rollout.redraw is None else rollout.redraw.draw
            sampling = msgspec.structs.replace(sampling, seed=turn_seed(fields.seed, turn, draw))
        oldest = 0 if rollout is None else rollout.oldest_version
        if answer is None:
            answer = await self._generated(request_id, name, pack_ints(sent_ids), sampling, oldest)
        answer = msgspec.structs.replace(answer, record_id=request_id)
        if session is not None:
            record = GenerationRecord(session=session, prompt_ids=token_ids, answer=answer, sampling=sampling)
            self._records.append(record, order)
        return answer

    async def _generated(self, request_id: str, name: str, prompt: bytes, sampling: Sampling, oldest: int) -> Answer:
        self._under_way[name] += 1
        try:
            return await self._router.generate(request_id, name, prompt, sampling, oldest_version=oldest)
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]

    async def _get_models(self, _: web.Request) -> web.Response:
        card = {"object": "model", "created": 0, "owned_by": "composer-prime", "max_model_len": self._max_context}
        return json_reply({"object": "list", "data": [{"id": name, **card} for name in self._model_names]})

    def _check_model(self, name: str) -> None:
        if name not in self._model_names:
            raise RequestError(
                f"model {name!r} is not served here: ask for {' or '.join(map(repr, self._model_names))}",
                status=404,
                code="model_not_found",
                param="model",
            )

    # -- around every route --------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the token, and give errors OpenAI's body."""
        try:
            self._authorize(request)
            return await handler(request)
        except web.RequestPayloadError:
            # aiohttp would read on after the reply and log this as its own error.
            request.content.feed_eof()
            encoding = request.headers.get("Content-Encoding", "")
            reply = _error(RequestError(f"the body does not decode as its Content-Encoding says: {encoding[:40]!a}"))
            reply.force_close()
            return reply
        except Exception as error:
            return _error(_to_request_error(error, request))

    def _authorize(self, request: web.Request) -> None:
        is_operators = request.path.startswith("/control/")
        token = self._operator_token if is_operators else self._token
        header = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if token is None or hmac.compare_digest(header, f"Bearer {token}".encode()):
            return
        message = (
            "the operator's token (keys/operator.token) is missing"
            if is_operators
            else "the Authorization header does not carry this gateway's token: send `Bearer` and the value of the "
            f"environment variable {GATEWAY_TOKEN_VARIABLE} that the orchestrator was started with"
        )
        raise RequestError(message, status=401, code="unauthorized")


def _to_request_error(error: Exception, request: web.Request) -> RequestError:
    match error:
        case RequestError():
            return error
        case DeadlineError():
            return RequestError(str(error), status=503, code="deadline")
        case EngineError():
            return RequestError(str(error), status=502, code="node_failed")
        case web.HTTPNotFound() | web.HTTPMethodNotAllowed():
            return RequestError(
                f"there is no {request.method} {request.path[:200]}: the routes are POST /inference/v1/generate, "
                "/v1/chat/completions and GET /v1/models",
                status=404,
                code="not_found",
            )
    logger.error("%s %a failed", request.method, request.path[:200], exc_info=error)
    return RequestError("the gateway failed; see the orchestrator's log", status=500, code="internal")


# -- input ---------------------------------------------------------------------------------------------------------


async def _decoded(request: web.Request, decoder: msgspec.json.Decoder[BodyT]) -> BodyT:
    """Raise RequestError naming the field and what was expected there."""
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            f"the body is larger than {_MAX_BODY_BYTES} bytes: shorten the prompt", status=413, code="too_large"
        ) from error
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"the body of {len(raw)} bytes is not a valid {request.path} request: {error}; it starts with {raw[:60]!r}"
        ) from None


def _checked_ids(prompt: bytes, vocab_size: int) -> np.ndarray:
    """Raise RequestError for a prompt without ids, or with a wrong one."""
    token_ids, valid_ids = ints(prompt), f"send at least one id in 0..{vocab_size - 1}"
    if not len(token_ids):
        raise RequestError(f"the prompt is empty: {valid_ids}", param="token_ids")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if not 0 <= lowest <= highest < vocab_size:
        outside = lowest if lowest < 0 else highest
        raise RequestError(f"token id {outside} is outside the vocabulary: {valid_ids}", param="token_ids")
    return token_ids


def _session(request: web.Request) -> str | None:
    session = request.headers.get("X-Session-ID")
    if session is not None and not (len(session) <= _MAX_SESSION_CHARACTERS and session.isprintable()):
        raise RequestError(
            f"X-Session-ID has {len(session)} characters, {session[:40]!a} first: send at most "
            f"{_MAX_SESSION_CHARACTERS} printable ones"
        )
    return session


def _check_no_stream(request: web.Request, stream: bool | None) -> None:
    # Nodes answer when a turn is complete.
    if stream:
        raise RequestError(f"stream is true: {request.path} answers in one piece; send stream=false", param="stream")


def _check_chat(body: ChatBody) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice is {body.tool_choice!r}: send 'auto' or 'none'", param="tool_choice")
    for name in ("logprobs", "top_logprobs"):
        if value := getattr(body, name):
            raise RequestError(
                f"{name} is {value}: chat replies have no logprobs; leave it out, or use /inference/v1/generate",
                param=name,
            )
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestError(f"response_format has type {kind!r}: only 'text' is supported", param="response_format")


# -- replies -------------------------------------------------------------------------------------------------------


def json_reply(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), headers={"Content-Type": "application/json"})


def _error(error: RequestError) -> web.Response:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return json_reply({"error": body}, error.status)


# -- generation ----------------------------------------------------------------------------------------------------


def to_sampling(fields: SamplingFields, *, num_prompt: int, max_context: int) -> Sampling:
    """Return the sampling parameters for a node. The reply is cut where the context ends.

    Raises RequestError for a parameter that is not supported and for a prompt that leaves no room.
    """
    for name in UnsupportedFields.__struct_fields__:
        value, neutral = getattr(fields, name), getattr(_NEUTRAL, name)
        if value is not None and value != neutral:
            message = f"{name} is {value!r}, which is not supported: leave it out or send {neutral!r}"
            raise RequestError(message, param=name)
    room = max_context - num_prompt
    if room < 1:
        raise RequestError(
            f"{context_overflow(num_prompt, max_context)}: shorten the conversation or raise model.max_context",
            code=_TOO_LONG,
            param="token_ids",
        )
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > _MAX_STOPS or "" in stop:
        raise RequestError(f"stop has {len(stop)} strings; send at most {_MAX_STOPS}, none of them empty", param="stop")
    return Sampling(
        max_tokens=min(fields.max_tokens or room, room),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        seed=fields.seed,
        stop=stop,
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
    )


def turn_seed(seed: int, turn: int, draw: int = 0) -> int:
    """Return the seed of a session's turn, counted from 0, and of a draw of it: no two have the same noise."""
    if draw:
        return _hashed_seed(f"{seed}/{turn}/{draw}")
    return _hashed_seed(f"{seed}/{turn}") if turn else seed


def _hashed_seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 11


# -- records -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One answered request: an assistant turn."""

    session: str
    """The rollout's id, with `#N` for a further agent of it."""
    prompt_ids: np.ndarray
    """int32 [T_prompt]."""
    answer: Answer
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Redraw:
    """How a rollout repeats a recorded one: one turn is drawn anew, those after it are free."""

    records: Sequence[GenerationRecord]
    """All of one session."""
    turn: int
    hinted_ids: np.ndarray | None = None
    """int32 [T]: what the model reads for it; None: the recorded prompt."""
    draw: int
    """From 1: another number draws other noise."""


@dataclass(slots=True)
class _OpenRollout:
    rollout_id: str
    oldest_version: int
    """Of the policy that may answer."""
    redraw: Redraw | None = None
    num_bytes: int = 0
    """Of the token ids and logprobs held."""
    sessions: dict[str, list[list[tuple[int, GenerationRecord]]]] = field(default_factory=dict)
    """By session, in lists of those that continue one another, with the order of their requests."""

    def answered(self, session: str) -> int:
        return sum(map(len, self.sessions.get(session, ())))

    def repeated(self, session: str, prompt_ids: np.ndarray) -> tuple[Answer | None, np.ndarray]:
        """Return the next turn's recorded answer or None, and the ids that a node reads. Raises RequestError."""
        redraw, turn = self.redraw, self.answered(session)
        if redraw is None or turn > redraw.turn:
            return None, prompt_ids
        if not np.array_equal(redraw.records[turn].prompt_ids, prompt_ids):
            raise RequestError(
                f"turn {turn} of {session} has another prompt than the recorded rollout that it repeats: the "
                "environment does not answer the same calls alike",
                status=409, code="not_repeated",
            )  # fmt: skip
        if turn < redraw.turn:
            return redraw.records[turn].answer, prompt_ids
        return None, prompt_ids if redraw.hinted_ids is None else redraw.hinted_ids

    def append(self, record: GenerationRecord, order: int) -> None:
        """Keep a record. Where it continues the one before, its prompt is the memory of all earlier ones."""
        chains, prompt = self.sessions.setdefault(record.session, []), record.prompt_ids
        self.num_bytes += prompt.nbytes + len(record.answer.token_ids) + len(record.answer.logprobs)
        before = chains[-1][-1][1] if chains else None
        if before is None or not _continues(prompt, before):
            chains.append([])
        else:
            self.num_bytes -= before.prompt_ids.nbytes
            shared = [(at, replace(turn, prompt_ids=prompt[: len(turn.prompt_ids)])) for at, turn in chains[-1]]
            chains[-1] = shared
        chains[-1].append((order, record))


def _continues(prompt: np.ndarray, before: GenerationRecord) -> bool:
    start, end = len(before.prompt_ids), len(before.prompt_ids) + len(before.answer)
    if not np.array_equal(prompt[:start], before.prompt_ids):
        return False
    return np.array_equal(prompt[start:end], before.answer.ids)


class RolloutRecords:
    """Sessions of open rollouts, by rollout id."""

    def __init__(self, placing: Placing | None = None, audits: Audits | None = None) -> None:
        """`placing` forgets sessions that end; `audits` are offered answers."""
        self._placing = placing
        self._audits = audits
        self._open: dict[str, _OpenRollout] = {}
        self.on_record: Callable[[GenerationRecord], None] | None = None
        """Gets each answer of an open rollout."""

    @property
    def num_bytes(self) -> int:
        """Bytes of token ids and logprobs held."""
        return sum(rollout.num_bytes for rollout in self._open.values())

    def open(self, rollout_id: str, oldest_version: int = 0, redraw: Redraw | None = None) -> None:
        """Record a rollout from now on. Older policies may not answer it; `redraw`: what it repeats.

        Raises ValueError when it is open already: every attempt at a rollout needs its own id.
        """
        if rollout_id in self._open:
            raise ValueError(f"rollout {rollout_id!r} is open already: every attempt at a rollout needs its own id")
        self._open[rollout_id] = _OpenRollout(rollout_id, oldest_version, redraw)

    def take(self, rollout_id: str) -> list[GenerationRecord]:
        """Close a rollout, and return its records in the order in which its requests began; none if it is not open."""
        rollout = self._open.pop(rollout_id, None)
        if rollout is None:
            return []
        if self._placing is not None:
            for session in {rollout_id, *rollout.sessions}:
                self._placing.forget(session)
        turns = [turn for chains in rollout.sessions.values() for chain in chains for turn in chain]
        return [record for _, record in sorted(turns, key=lambda turn: turn[0])]

    def find(self, session: str) -> _OpenRollout | None:
        """Return the open rollout that `session` belongs to."""
        return self._open.get(session) or self._open.get(_AGENT.sub("", session))

    def append(self, record: GenerationRecord, order: int) -> None:
        """Keep `record` if its rollout is open. `order` tells when its request began."""
        rollout = self.find(record.session)
        if rollout is not None:
            rollout.append(record, order)
            if self.on_record is not None:
                self.on_record(record)
            is_free = rollout.redraw is None or rollout.answered(record.session) > rollout.redraw.turn + 1
            if self._audits is not None and is_free:  # Not what a redraw repeats, nor the turn behind its hint.
                self._audits.offer(rollout.rollout_id, record.prompt_ids, record.answer, record.sampling)
