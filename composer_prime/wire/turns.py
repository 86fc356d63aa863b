"""Of a prompt, only what the other side does not hold: the packed form of POST /inference/v1/generate, and nodes.

    client --first request: JSON, Accept: PACKED--> gateway --PackedAnswer--> the client knows that packed is understood
    client --prefix (length and digest), new ids--> gateway --PackedAnswer--> client
                           the gateway does not hold that prefix --409--> the client sends the whole prompt

The records of an open rollout hold each session's prompt and answer, and the client remembers the same tokens. The next
prompt usually continues them. The digest decides: a prefix that differs on both ends is never used. A gateway that does
not know the packed form answers JSON, and the client stays with JSON.

    gateway --Generate: prefix, new ids--> node --Generated--> gateway                               (wire/node.py)
                           the node does not hold that prefix --GenerateFailed--> the gateway sends the whole prompt
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from composer_prime.wire.packed_answer import PackedAnswer
from composer_prime.wire.types import INT, ints, pack_ints

POLICY = "policy"
"""The model name under which requests ask for the policy that is trained."""
GATEWAY_TOKEN_VARIABLE = "COMPOSER_GATEWAY_TOKEN"
"""Environment variable that holds the gateway's bearer token."""
PACKED = "application/vnd.msgpack"
"""Content type of packed requests and answers."""
JSON = "application/json"
PREFIX_MISSING = "prefix_missing"
"""Error code of the 409 that asks for the whole prompt."""
_DIGEST_BYTES = 16
_MAX_REMEMBERED_TOKENS = 1 << 21
"""Tokens that a client remembers, 4 bytes each. The conversation that was used least recently goes first."""
_MAX_HELD_TOKENS = 1 << 24
"""Tokens that a node keeps, 4 bytes each: 64 MiB."""
_SPARE = 8
"""A sequence that grows gets room for one eighth more."""

Send = Callable[[bytes, Mapping[str, str]], Awaitable[tuple[int, str, bytes]]]
"""Posts a body with these headers. Returns status, content type and body of the answer."""


def context_overflow(num_prompt: int, max_context: int, num_new: int = 1) -> str:
    """Return how the error of a prompt begins that leaves no room for `num_new` more tokens.

    Clients recognize these words; renderers' own check uses them too.
    """
    return f"Prompt length ({num_prompt}) exceeds maximum context length ({max_context}) less {num_new} for the reply"


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that the receiver holds."""

    num_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)]
    digest: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    """Of its int32 ids."""


_ANSWER_DECODER = msgspec.msgpack.Decoder(PackedAnswer)


class TokenHash:
    """The digest of a sequence of ids that grows at its end."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)

    def extended(self, ids: bytes | memoryview) -> TokenHash:
        """Return the hash of the sequence with `ids`, int32 [T], after it."""
        longer = TokenHash()
        longer._hash = self._hash.copy()
        longer._hash.update(ids)
        longer.num_tokens = self.num_tokens + memoryview(ids).nbytes // INT.itemsize
        return longer

    def prefix(self) -> Prefix:
        return Prefix(num_tokens=self.num_tokens, digest=self._hash.digest())


@dataclass(slots=True)
class HashedTokens:
    """Ids that grow at their end, hashed as far as somebody asked."""

    tokens: np.ndarray
    """int32 [T]."""
    hashed: TokenHash = field(default_factory=TokenHash)
    """Of their first `hashed.num_tokens`."""
    _room: np.ndarray = field(default_factory=lambda: np.empty(0, INT))
    """`tokens` is its beginning, once it has grown."""

    def extend(self, *parts: np.ndarray) -> None:
        """Add ids, int32 [T_part] each. Views of `tokens` keep what they show."""
        size = len(self.tokens)
        total = size + sum(map(len, parts))
        if total > len(self._room):
            self._room = np.empty(total + total // _SPARE, INT)
            self._room[:size] = self.tokens
        np.concatenate(parts, out=self._room[size:total])
        self.tokens = self._room[:total]

    def hash_of(self, size: int) -> TokenHash:
        """Return the hash of the first `size` tokens: only what comes after `hashed` is read where that is shorter."""
        if size < self.hashed.num_tokens:
            return TokenHash().extended(self.tokens[:size].data)
        self.hashed = self.hashed.extended(self.tokens[self.hashed.num_tokens : size].data)
        return self.hashed

    def starts_with(self, prefix: Prefix) -> bool:
        size = prefix.num_tokens
        return size <= len(self.tokens) and self.hash_of(size).prefix() == prefix


class HeldPrompts:
    """What a node keeps of recent conversations, so that a turn brings its new tokens only."""

    def __init__(self, max_tokens: int = _MAX_HELD_TOKENS) -> None:
        """`max_tokens`: of all conversations. The one that was used least recently goes first."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._sessions: OrderedDict[str, HashedTokens] = OrderedDict()

    def take(self, session: str, prefix: Prefix | None, new_ids: bytes) -> np.ndarray | None:
        """Return the prompt, int32 [T], that continues `prefix` of this session with `new_ids`, and keep it.

        None when that prefix is not held. Raises ValueError if `new_ids` are not int32.
        """
        new, held = ints(new_ids), self._sessions.get(session)
        if prefix is None:
            self._keep(session, HashedTokens(new))
            return new
        if held is None or not held.starts_with(prefix):
            return None
        size = prefix.num_tokens
        prompt = np.concatenate([held.tokens[:size], new])
        self._keep(session, HashedTokens(prompt, held.hash_of(size)))
        return prompt

    def add_answer(self, session: str, prompt: np.ndarray, answer_ids: list[int]) -> None:
        """Keep the answer to `prompt` too, unless a newer prompt of the session has come."""
        held = self._sessions.get(session)
        if held is not None and held.tokens is prompt:
            tokens = np.concatenate([prompt, np.asarray(answer_ids, INT)])
            self._keep(session, HashedTokens(tokens, held.hashed))

    def _keep(self, session: str, held: HashedTokens) -> None:
        former = self._sessions.pop(session, None)
        self._sessions[session] = held
        self._num_tokens += len(held.tokens) - (0 if former is None else len(former.tokens))
        while self._num_tokens > self._max_tokens:
            _, oldest = self._sessions.popitem(last=False)
            self._num_tokens -= len(oldest.tokens)


class TurnClient:
    """Asks for turns in the packed form once the gateway has shown that it knows it."""

    def __init__(self, max_tokens: int = _MAX_REMEMBERED_TOKENS) -> None:
        """`max_tokens`: tokens remembered, of all conversations."""
        self._is_understood = False
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._conversations: OrderedDict[str, HashedTokens] = OrderedDict()
        """Prompt and answer of the newest turn, hashed to the end of the prompt: a renderer may write the answer
        differently into the next prompt."""

    async def ask(self, session: str | None, body: Mapping[str, Any], send: Send) -> tuple[int, PackedAnswer | bytes]:
        """Return the answer to `body`, a request in its JSON form, or the body of a JSON answer or an error.

        `session`: the X-Session-ID that `send` adds; None remembers nothing.
        """
        if not self._is_understood:
            headers = {"Content-Type": JSON, "Accept": f"{PACKED}, {JSON}"}
            status, content_type, content = await send(msgspec.json.encode(body), headers)
            if status != 200 or content_type != PACKED:
                return status, content
            self._is_understood = True
            token_ids = ints(pack_ints(body["token_ids"]))
            prompt = TokenHash().extended(token_ids.data)
        else:
            token_ids = ints(pack_ints(body["token_ids"]))
            held = self._held(session, token_ids)
            status, content, prompt = await _post(body, token_ids, held, send)
            if status == 409 and held.num_tokens and _is_prefix_missing(content):
                status, content, prompt = await _post(body, token_ids, TokenHash(), send)
            if status != 200:
                return status, content
        answer = _ANSWER_DECODER.decode(content)
        if session is not None:
            self._remember(session, token_ids, prompt, answer)
        return status, answer

    def _held(self, session: str | None, token_ids: np.ndarray) -> TokenHash:
        """Return the hash of the longest start of `token_ids` that the gateway should hold; empty without one."""
        conversation = self._conversations.get(session) if session is not None else None
        if conversation is not None:
            for size in (len(conversation.tokens), conversation.hashed.num_tokens):
                if np.array_equal(token_ids[:size], conversation.tokens[:size]):
                    return conversation.hash_of(size)
        return TokenHash()

    def _remember(self, session: str, token_ids: np.ndarray, prompt: TokenHash, answer: PackedAnswer) -> None:
        self._forget(session)
        conversation = np.concatenate([token_ids, ints(answer.token_ids)])
        self._conversations[session] = HashedTokens(conversation, prompt)
        self._num_tokens += len(conversation)
        while self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._conversations)))

    def _forget(self, session: str) -> None:
        conversation = self._conversations.pop(session, None)
        if conversation is not None:
            self._num_tokens -= len(conversation.tokens)


async def _post(
    body: Mapping[str, Any], token_ids: np.ndarray, held: TokenHash, send: Send
) -> tuple[int, bytes, TokenHash]:
    """Send what follows `held` in the prompt. Return status and body of the answer, and the hash of the prompt."""
    new_ids = pack_ints(token_ids[held.num_tokens :])
    turn = {
        "model": body["model"],
        "prefix": held.prefix() if held.num_tokens else None,
        "new_ids": new_ids,
        "sampling_params": body["sampling_params"],
    }
    status, _, content = await send(msgspec.msgpack.encode(turn), {"Content-Type": PACKED, "Accept": PACKED})
    return status, content, held.extended(new_ids)


def _is_prefix_missing(content: bytes) -> bool:
    try:
        return msgspec.json.decode(content)["error"]["code"] == PREFIX_MISSING
    except (msgspec.DecodeError, KeyError, TypeError):
        return False
