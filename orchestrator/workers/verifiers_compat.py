"""Replacements for parts of verifiers 0.4 and renderers 0.1, each for a measured reason.

1. `GatewayClient` is verifiers' TrainClient over one aiohttp session. The stock OpenAI client uses httpx, whose pool
   walks every open connection at every request. With 256 rollouts in flight that walk is the largest cost of a turn.
2. `install_renderer` puts our renderer where TrainClient looks for one. The stock path uses AutoTokenizer, which
   imports torch (0.6 GiB and 7 s in every worker).
3. `import_dotted_plugins`: the stock loader looks for a plugin in its own namespace first, and fails when the id has a
   dot. So `orchestrator.environments.toolsmith` would not load.
4. `keep_folders_in`: the subprocess runtime makes a folder named after the rollout in the user's cache. Two runs could
   use the same one there, and a killed worker would never remove it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import jinja2
import msgspec
from pydantic import Field
from renderers import RendererConfig
from renderers.client import MalformedGenerateResponseError
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot, TrainClient
from verifiers.v1.configs.client import TrainClientConfig, resolve_api_key
from verifiers.v1.errors import ProviderError, RolloutError
from verifiers.v1.runtimes import subprocess as subprocess_runtime
from verifiers.v1.types import AssistantMessage, Response
from verifiers.v1.utils import loaders

_LOST = (aiohttp.ClientOSError, aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)
_ASK_AGAIN_S = (0.1, 1.0)
"""Pauses after lost connections. A turn that is asked for again counts once (rollouts/rollout.py)."""
_IDLE_S = 15.0
"""The client closes idle connections before the gateway does, so no request meets a closing one."""
_CONNECT_S = 30.0
_LONGEST_TOKEN = 256
"""Characters of one token at most, in the tokenizers that are known."""


class GatewayHttp:
    """The part of an OpenAI client that `renderers.client.generate` calls, over one aiohttp session.

    Failures become verifiers' ProviderError. Its status tells whether another try makes sense: the gateway's own, or
    503 for a refused or lost connection.
    """

    def __init__(self, base_url: str, token: str) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            trust_env=False,
        )

    async def get(self, path: str, *, cast_to: Any = None) -> Any:
        url = self.base_url + path
        return json.loads(await self._send("GET", url, {}, None))

    async def post(self, url: str, *, cast_to: Any, body: dict[str, Any], options: Any = None) -> Any:
        """Post `body` of /inference/v1/generate, and return its answer."""
        headers = {"Content-Type": "application/json", **((options or {}).get("headers") or {})}
        return SimpleNamespace(content=await self._send("POST", url, headers, msgspec.json.encode(body)))

    async def close(self) -> None:
        await self._session.close()

    async def _send(self, method: str, url: str, headers: dict[str, str], data: bytes | None) -> bytes:
        """Return the body of a good answer. Raises ProviderError."""
        headers = {**self._headers, **headers}
        for pause_s in (*_ASK_AGAIN_S, None):
            try:
                async with self._session.request(method, url, data=data, headers=headers) as reply:
                    content = await reply.read()
            except (aiohttp.ClientError, OSError) as error:
                if pause_s is None or not isinstance(error, _LOST):
                    raise ProviderError(f"{url}: {type(error).__name__}: {error}", status_code=503) from error
                await asyncio.sleep(pause_s)
                continue
            if reply.status >= 400:
                raise ProviderError(_message(content) or f"{url} answered {reply.status}", status_code=reply.status)
            return content
        raise AssertionError("the last try returns or raises")


def _message(content: bytes) -> str:
    """Return the text of an OpenAI-style error body, or the start of any other body."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace")


class RecordedMessage(AssistantMessage):
    """A sampled message that knows the gateway's record of its tokens."""

    record_id: str = Field(default="", exclude=True)


RecordedMessage.__name__ = AssistantMessage.__name__
"""verifiers tells messages apart by the names of their classes: with another one, no prompt would continue a trace."""


class RenderError(RolloutError):
    """The model folder's renderer or chat template cannot render this conversation."""

    status_code = 400


class GatewayClient(TrainClient):
    """verifiers' training client; its renderer must have been installed (`install_renderer`)."""

    def __init__(self, config: TrainClientConfig, max_tokens: int | None = None) -> None:
        """`max_tokens`: of a conversation. One whose text cannot fit is refused before it is rendered."""
        self.config = config
        self._max_chars = None if max_tokens is None else max_tokens * _LONGEST_TOKEN
        self.client = GatewayHttp(config.base_url, resolve_api_key(config))

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Response:
        texts = [message.get("content") for message in body.get("messages") or []]
        chars = sum(len(text) for text in texts if isinstance(text, str))
        if self._max_chars is not None and chars > self._max_chars:
            raise ProviderError(
                f"the conversation has {chars} characters and exceeds the maximum context length, which holds "
                f"{self._max_chars} at most (model.max_context): have tools and users return less",
                status_code=400,
            )
        try:
            response = await super().get_response(dialect, body, *args, **kwargs)
        except MalformedGenerateResponseError as error:
            raise ProviderError(f"the gateway's reply breaks the generate contract: {error}") from error
        except (jinja2.TemplateError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
        # The trace keeps this very object as the turn's message.
        response.message = RecordedMessage.model_construct(**dict(response.message), record_id=response.id)
        return response


def install_renderer(model_path: str, config: RendererConfig, renderer: Any) -> None:
    """Make every TrainClient of this process with this model and configuration use `renderer`."""
    pool = ElasticRendererPool(model_path, config, multiplex=1)
    pool.renderers[:] = [RendererSlot(renderer)]


@functools.cache
def import_dotted_plugins() -> None:
    """Import a plugin id with a dot as a module path."""
    stock = loaders._import_plugin

    def import_plugin(plugin_id: str, kind: str, group: str) -> ModuleType:
        return importlib.import_module(plugin_id) if "." in plugin_id else stock(plugin_id, kind, group)

    loaders._import_plugin = import_plugin


def keep_folders_in(folder: Path) -> None:
    """Make the subprocess runtime's working folders in `folder`."""
    subprocess_runtime.CACHE_DIR = folder


def taskset_settings(taskset_id: str) -> list[str]:
    """Import a task set and return the names of its own settings. Raises what its import raises."""
    import_dotted_plugins()
    common = loaders.TasksetConfig.model_fields
    return [name for name in loaders.taskset_config_type(taskset_id).model_fields if name not in common]
