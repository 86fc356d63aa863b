"""From a model folder to a sharded policy.

    every rank: the architecture without values (meta device) -> FSDP2 shards -> empty storage on the device
    rank 0:     the folder's weights on the CPU, as stored ----scatter in float32, tensor by tensor----> all shards

Rank 0 alone ever holds the whole model, on the CPU, in the type of the folder. It also checks that packed rows give
the same log-probabilities (`check_packing`), and finds what text never reaches, such as a vision tower: no rank trains
it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from composer_prime.config import Config
from composer_prime.config.trainer import is_softmax_attention
from composer_prime.errors import ConfigError, ModelNotFoundError
from composer_prime.model_source import weight_files
from trainer.data import first_alone, reading_of
from trainer.model.adapters import inject_adapters
from trainer.model.policy_model import ATTENTION, FORWARD_METHODS, PACKED, Policy, attention_name
from trainer.world import World, gather_texts

PROBE_LENGTHS = (7, 12)
PROBE_TOLERANCE = 1e-3
"""Nats."""
_DROPOUT = re.compile(r"dropout|pdrop|layerdrop|drop_rate|drop_path")
logger = logging.getLogger(__name__)


def build_policy(config: Config, folder: Path, world: World) -> Policy:
    """Return the policy of `config`, sharded over all ranks, with the weights of `folder` as float32 masters.

    A collective. Raises ModelNotFoundError (no loadable model) or ConfigError (a model that packed rows cannot train;
    attention that is not to be had here).
    """
    attention = attention_name(config.model.attention, world.device.type, world.compute_dtype)
    torch.manual_seed(config.run.seed)
    lm, adapted = empty_model(folder, attention, config), config.trainer.lora is not None
    if problem := config.trainer.shape_problem(lm.config.get_text_config().to_dict()):
        raise ConfigError(problem)
    offloads = "activations" in config.trainer.offload
    policy = Policy(lm, attention, adapted=adapted, offloads=offloads, context=world.context)
    if policy.is_recurrent and (world.context is not None or config.trainer.compile is not None):
        setting = "compile" if world.context is None else "context_parallel"
        raise ConfigError(
            f"trainer.{setting} is {getattr(config.trainer, setting)!r}, but {type(lm).__name__} has layers that carry "
            "a state along whole rows: leave it out"
        )
    buffers = {name: buffer.to(world.device, copy=True) for name, buffer in policy.named_buffers()}
    shard_policy(policy, world)
    policy.to_empty(device=world.device)
    policy.lm.tie_weights()
    for name, buffer in policy.named_buffers():
        buffer.copy_(buffers[name])
    load = functools.partial(_whole_state, config, folder, attention, policy)
    state, unreached = first_alone(world, "training", "the model that rank 0 loads", load) or ({}, [])
    _scatter(policy, state, world)
    frozen = set(gather_texts("\n".join(unreached))[0].splitlines())
    for name, parameter in policy.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if config.trainer.activation_checkpointing:
        policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
    if config.trainer.compile is not None:
        compile_blocks(policy, config.trainer.compile)
    return policy.train()


def empty_model(folder: Path, attention: str, config: Config) -> PreTrainedModel:
    """Return the architecture of `folder` with parameters on the meta device and real buffers; adapters included."""
    with init_empty_weights(include_buffers=False):
        lm = AutoModelForCausalLM.from_config(
            read_model_config(folder), dtype=torch.float32, attn_implementation=attention
        )
    lm.tie_weights()
    _adapt(lm, config)
    return lm


def read_model_config(folder: Path) -> PretrainedConfig:
    """Return the configuration of the model in `folder`, without dropout.

    With dropout the trained policy would not be the one that sampled. Raises ModelNotFoundError without a usable one.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model.path: {folder} holds no usable config.json: {error}") from None
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if _DROPOUT.search(name) and isinstance(value, float) and value > 0:
                _log_dropout(folder, name, value)
                setattr(part, name, 0.0)
    return config


@functools.cache
def _log_dropout(folder: Path, name: str, value: float) -> None:
    logger.info("%s: %s is %g and counts as 0: a policy is trained as it is sampled", folder, name, value)


def _adapt(lm: PreTrainedModel, config: Config) -> None:
    if config.trainer.lora is None:
        return
    seed = config.run.seed
    if config.diloco is not None:  # the same first values for all peers, whose run.seed differs
        seed = int.from_bytes(hashlib.blake2b(config.diloco.run.encode(), digest_size=7).digest())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs for good
        inject_adapters(lm, config.trainer.lora)


def blocks(lm: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder blocks in order: what `lm` declares indivisible, else its longest list."""
    names = set(lm._no_split_modules or ())
    declared = [module for module in lm.modules() if type(module).__name__ in names]
    if declared:
        return declared
    lists = [module for module in lm.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=nn.ModuleList()))


def shard_policy(policy: Policy, world: World) -> None:
    """Apply FSDP2 to each block and to the rest; gradients are summed over all ranks in float32, not averaged.

    Experts that ranks share are cut between experts over `ep`, and within each over `efsdp`. Raises ConfigError for
    those that cannot be.
    """
    half = world.compute_dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=world.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=half
    )
    root_precision = dataclasses.replace(precision, cast_forward_inputs=False)  # keeps temperatures in float32
    if world.experts is not None:
        for module in _owned_experts(policy.lm, world.experts):
            fully_shard(
                module, mesh=world.experts["efsdp"], mp_policy=root_precision, shard_placement_fn=lambda _: Shard(1)
            )
    for block in blocks(policy.lm):
        fully_shard(block, mesh=world.mesh, mp_policy=precision)
    fully_shard(policy, mesh=world.mesh, mp_policy=root_precision)
    for name in FORWARD_METHODS:
        register_fsdp_forward_method(policy, name)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def compile_blocks(policy: Policy, backend: str) -> None:
    """Compile each block once, for rows of all lengths. Attention runs as it is: its calls follow the trees of a row.

    Raises ConfigError for a backend that torch does not have.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"trainer.compile is {backend!r}, which torch does not have here; use {', '.join(known)}")
    for name, attend in ATTENTION.items():
        AttentionInterface.register(name, torch.compiler.disable(attend))
    for block in blocks(policy.lm):
        block.compile(backend=backend, dynamic=True)


def _owned_experts(lm: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Give each rank of `ep` its part of the experts of `lm`, and return the modules that hold them."""
    from transformers.distributed.tensor_parallel import apply_expert_parallelism  # moves in transformers 5.24

    plan, owners = lm.ep_plan, mesh.size(1)
    if "ep_dispatch_experts" not in plan.values():
        raise ConfigError(
            f"trainer.expert_parallel is {owners}, but transformers has no plan for the experts of a "
            f"{type(lm).__name__}: set it to 1"
        )
    apply_expert_parallelism(lm, mesh["ep"], None, plan)  # pyright: ignore[reportArgumentType]  no tensor parallelism
    cut = {module: [p for p in module.parameters(recurse=False) if isinstance(p, DTensor)] for module in lm.modules()}
    for parameter in (each for own in cut.values() for each in own):
        if parameter.ndim < 2 or parameter.shape[1] % mesh.size(0):
            raise ConfigError(
                f"trainer.expert_parallel is {owners}, but {mesh.size(0)} ranks cannot cut experts of shape "
                f"{[*parameter.shape[1:]]} evenly: raise it, or set it to 1"
            )
    return [module for module, own in cut.items() if own]


def _whole_state(config: Config, folder: Path, attention: str, policy: Policy) -> tuple[dict[str, Tensor], list[str]]:
    """Return on rank 0 every parameter and stored buffer, and the names of those to freeze. Raises ConfigError."""
    transformers_logging.disable_progress_bar()
    on_cpu = PACKED if attention == PACKED else "eager"
    try:
        lm = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_stored_type(folder, policy.lm), attn_implementation=on_cpu, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model.path: no model can be loaded from {folder}: {error}") from None
    with _in_float32(lm):
        check_packing(lm)
    _adapt(lm, config)
    state = {f"lm.{name}": tensor.detach() for name, tensor in [*lm.named_parameters(), *frozen_buffers(lm).items()]}
    with _in_float32(lm):
        return state, [f"lm.{name}" for name in unreached_parameters(lm)]


def _stored_type(folder: Path, lm: PreTrainedModel) -> torch.dtype:
    """Return the type of the folder's weights; float32 where they have several, but for those that stay in float32."""
    kept, types = [*(lm._keep_in_fp32_modules_strict or ())], set()
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if not any(part in name for part in kept)]  # noqa: SIM118
            types |= {tensors.get_slice(name).get_dtype() for name in names}
    stored = types.pop() if len(types) == 1 else ""
    return {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)


@contextmanager
def _in_float32(lm: PreTrainedModel) -> Iterator[None]:
    """Let `lm` compute in float32 inside the block. A decoder block is converted only while it runs."""
    stored = [(parameter, parameter.data) for parameter in lm.parameters()]
    of_blocks = {id(parameter): parameter.data for block in blocks(lm) for parameter in block.parameters()}

    def restore(block: nn.Module, *_: object) -> None:
        for parameter in block.parameters():
            parameter.data = of_blocks[id(parameter)]

    handles = [block.register_forward_pre_hook(lambda block, _: block.float() and None) for block in blocks(lm)]
    handles += [block.register_forward_hook(restore, always_call=True) for block in blocks(lm)]
    for parameter, values in stored:
        parameter.data = values if id(parameter) in of_blocks else values.float()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, values in stored:
            parameter.data = values


def unreached_parameters(lm: PreTrainedModel) -> list[str]:
    """Return the names of trainable parameters that get no gradient from text.

    A block counts as a whole: an expert that a short text does not choose is still trained.
    """
    ids = torch.arange(PROBE_LENGTHS[0])[None] % lm.config.get_text_config().vocab_size
    nothing_kept = saved_tensors_hooks(lambda _: torch.empty(0), lambda kept: kept)  # No backward pass follows.
    with torch.enable_grad(), _plain_attention(lm), nothing_kept:
        reached = _leaves(lm(input_ids=ids, use_cache=False).logits)
    for block in blocks(lm):
        parameters = {id(parameter) for parameter in block.parameters()}
        if reached & parameters:
            reached |= parameters
    return [name for name, each in lm.named_parameters() if each.requires_grad and id(each) not in reached]


def _leaves(output: Tensor) -> set[int]:
    """Return the ids of the parameters that `output` depends on."""
    leaves: set[int] = set()
    seen, open_nodes = set(), [output.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            leaves.add(id(variable))
        open_nodes += [before for before, _ in node.next_functions]
    return leaves


def frozen_buffers(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, such as a router's bias: loaded and published, never trained."""
    stored = lm.state_dict().keys()
    return {name: buffer for name, buffer in lm.named_buffers() if name in stored}


@torch.no_grad()
def _scatter(policy: Policy, state: dict[str, Tensor], world: World) -> None:
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor)
        on_first = state.pop(name).to(world.device, torch.float32) if world.first else None
        whole = torch.empty(parameter.shape, device=world.device) if on_first is None else on_first
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    for name, buffer in frozen_buffers(policy.lm).items():
        if world.first:
            buffer.copy_(state.pop(f"lm.{name}"))
        dist.broadcast(buffer, 0)


@torch.no_grad()
def check_packing(lm: PreTrainedModel) -> float:
    """Score two short documents alone and in one row; return the largest difference, nats on the CPU in float32.

    Alone is transformers' own forward pass, in one row the trainer's. Leaks between documents, state carried along a
    row, or a head with an unknown scaling show here. Raises ConfigError above PROBE_TOLERANCE.
    """
    draw = torch.Generator().manual_seed(0)
    vocabulary = lm.config.get_text_config().vocab_size
    documents = [torch.randint(0, vocabulary, (length,), generator=draw) for length in PROBE_LENGTHS]
    lm.eval()
    attention = lm.config._attn_implementation
    assert attention is not None
    wanted = [np.arange(1, length) for length in PROBE_LENGTHS]
    row = reading_of([ids.numpy() for ids in documents], wanted, torch.device("cpu"), share=False)
    packed = Policy(lm, attention).scores(row, torch.cat([ids[1:] for ids in documents]))
    with _plain_attention(lm):
        logits = [lm(input_ids=ids[None], use_cache=False).logits[0, :-1].float() for ids in documents]
    pairs = zip(logits, documents, strict=True)
    alone = [each.log_softmax(-1).gather(1, ids[1:, None]) for each, ids in pairs]
    worst = (packed - torch.cat(alone).squeeze(1)).abs().max().item()
    if not worst <= PROBE_TOLERANCE:
        raise ConfigError(
            f"{type(lm).__name__}: log-probabilities in a packed row differ by {worst:.3g} nats from those of the same "
            f"documents alone (allowed {PROBE_TOLERANCE}): {_reason(lm)}; use another model, or open an issue that "
            "names it"
        )
    return worst


@contextmanager
def _plain_attention(lm: PreTrainedModel) -> Iterator[None]:
    """Let `lm` read single documents inside the block."""
    attention = lm.config._attn_implementation
    assert attention is not None
    lm.set_attn_implementation("sdpa" if attention == PACKED else attention)
    yield
    lm.set_attn_implementation(attention)


def _reason(lm: PreTrainedModel) -> str:
    layers = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    recurrent = sorted(kind for kind in layers if not is_softmax_attention(kind))
    if not recurrent:
        return "this architecture cannot be trained on packed rows"
    return (
        f"its {', '.join(recurrent)} layers carry state from one document of a row into the next, which would need "
        "kernels that restart at the borders of documents"
    )
