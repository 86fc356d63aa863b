"""Clients that people and environments really use, unchanged, against the gateway."""

from __future__ import annotations

import pytest
from gateway_made import MODEL
from node_peer import PeerNode

from composer_prime.wire.node_messages import Generate
from composer_prime.wire.types import VersionSpan, ints, pack_floats, pack_ints

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def saying(node: PeerNode, text: str):
    """Makes `node` answer with `text` and the end-of-turn token."""
    from orchestrator.chat_renderer import read_tokenizer

    tokenizer = read_tokenizer(str(MODEL))
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]

    def answer(request: Generate):
        return node.usual_answer(
            request,
            token_ids=pack_ints(ids),
            logprobs=pack_floats([-0.25] * len(ids)),
            version_spans=[VersionSpan(0, len(ids), 0)],
        )

    node.answer = answer
    return ids


async def test_the_openai_client_chats_with_tools(open_gateway, node_keys):
    """An ordinary OpenAI client gets text, tool calls and usage."""
    from openai import AsyncOpenAI

    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        client = AsyncOpenAI(base_url=gateway.http_url + "/v1", api_key="EMPTY")
        ids = saying(node, "The answer is 4.")
        plain = await client.chat.completions.create(
            model="policy", messages=MESSAGES, max_tokens=200, temperature=0.5, seed=1
        )
        choice = plain.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("The answer is 4.", "stop")
        assert choice.token_ids == ids
        assert plain.usage.completion_tokens == len(ids)
        assert plain.usage.prompt_tokens == len(ints(node.generates[0].prompt_ids))
        assert node.generates[0].sampling.temperature == 0.5

        saying(node, '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>')
        called = await client.chat.completions.create(model="policy", messages=MESSAGES, tools=TOOLS, max_tokens=200)
        [call] = called.choices[0].message.tool_calls
        assert (called.choices[0].finish_reason, call.function.name) == ("tool_calls", "add")
        assert call.function.arguments == '{"a": 2, "b": 2}'

        assert "policy" in [model.id async for model in client.models.list()]
        await client.close()


@pytest.mark.process  # the tokenizer's import asks ldconfig
@pytest.mark.timeout(240)
async def test_the_workers_client_gets_what_verifiers_client_gets(open_gateway, node_keys):
    """verifiers 0.4's TrainClient, unchanged, and the workers': the tokens of the records, over three turns."""
    pytest.importorskip("verifiers.v1")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.errors import ProviderError
    from verifiers.v1.graph import message_hash
    from verifiers.v1.types import AssistantMessage, SamplingConfig

    from orchestrator.chat_renderer import build_renderer
    from orchestrator.workers.verifiers_adapter import GatewayClient, install_renderer

    renderer_config, renderer = build_renderer(str(MODEL), None)
    install_renderer(str(MODEL), renderer_config, renderer)
    async with open_gateway() as gateway, PeerNode(gateway.node_endpoint, node_keys, "n0") as node:
        saying(node, "The answer is 4.")
        records = {}
        for make in (TrainClient, GatewayClient):
            client = make(
                TrainClientConfig(
                    base_url=gateway.http_url + "/v1",
                    api_key_var="COMPOSER_GATEWAY_TOKEN",
                    renderer=renderer_config,
                    renderer_model_name=str(MODEL),
                )
            )
            name, messages, tokens = make.__name__, list(MESSAGES), []
            gateway.records.open(name)
            for _ in range(3):
                body = {"model": "policy", "messages": messages, "tools": TOOLS}
                sampling = SamplingConfig(temperature=1.0, max_tokens=60, seed=5)
                response = await client.get_response(ChatDialect(), body, sampling, session_id=name)
                tokens.append(response.tokens)
                plain = AssistantMessage(**response.message.model_dump())
                assert message_hash(response.message) == message_hash(plain), "a later prompt continues this turn"
                answer = {"role": "assistant", "content": response.message.content}
                messages = [*messages, answer, {"role": "user", "content": "Are you sure?"}]
            with pytest.raises(ProviderError, match="maximum context length"):
                long = {"model": "policy", "messages": [{"role": "user", "content": "word " * 3000}]}
                await client.get_response(ChatDialect(), long, SamplingConfig(max_tokens=6), session_id=name)
            await client.close()
            taken = gateway.records.take(name)
            records[name] = [
                (one.prompt_ids.tolist(), one.answer.ids.tolist(), one.answer.token_logprobs.tolist()) for one in taken
            ]
            assert records[name] == [(one.prompt_ids, one.completion_ids, one.completion_logprobs) for one in tokens]
            records[name] += [one.sampling for one in taken]
        assert records["TrainClient"] == records["GatewayClient"] and len(records["GatewayClient"]) == 6
