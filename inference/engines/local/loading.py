"""The model in memory: load its folder, compute a step, copy new weights into it in place."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from composer_prime.config.inference import InferenceConfig
from composer_prime.errors import ConfigError, EngineError, MisfitError, ModelNotFoundError
from inference.engines.base import ReadBack, refuse_misfits
from inference.engines.local.cache import IMPLEMENTATION, EngineStep
from inference.snapshot import tensor_blocks, word_sum

logger = logging.getLogger(__name__)

_one_load = threading.Lock()
"""transformers replaces methods of its classes while it loads. Two loads at a time leave them replaced: every later one
then misses tied tensors."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class LoadedModel:
    def __init__(self, folder: Path, config: InferenceConfig, max_context: int) -> None:
        self.module = load_model(folder, config)
        _check_context(self.module, max_context)
        self.device = next(self.module.parameters()).device
        self.vocab = self.module.get_input_embeddings().get_parameter("weight").shape[0]
        self.eos = _end_tokens(self.module)
        self.decode = _text_decoder(folder)
        self._takes_rows = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self._targets = published_views(self.module)

    def forward(self, step: EngineStep) -> torch.Tensor:
        """Return the logits [R, V] of the step's rows, [N, V] when it names none."""
        rows = None if step.rows is None else step.rows.to(self.device)
        only_rows = {"logits_to_keep": rows} if rows is not None and self._takes_rows else {}
        ids, positions = step.input_ids.to(self.device), step.position_ids.to(self.device)
        logits = self.module(
            input_ids=ids, position_ids=positions, use_cache=False, slot_step=step, **only_rows
        ).logits[0]
        return logits if rows is None or only_rows else logits[rows]

    @torch.no_grad()
    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy `tensors`, by published name, into the model. In-place copies keep tied parameters tied.

        Raises MisfitError; then nothing was changed.
        """
        targets, groups = self._targets, _tied_names(self.module, self._targets)
        missing = [names[0] for names in groups if not tensors.keys() & names]
        refuse_misfits(tensors, {name: tuple(target.shape) for name, target in targets.items()}, missing)
        for names in groups:
            _check_tied(tensors, names)
        for name in tensors:
            if targets[name].is_contiguous():
                flat = targets[name].view(-1)
                for start, values in tensor_blocks(tensors, name):
                    flat[start : start + len(values)].copy_(values)
            else:
                targets[name].copy_(tensors[name])

    def read_back(self, names: list[str]) -> list[ReadBack]:
        dtypes = {name: str(self._targets[name].dtype).removeprefix("torch.") for name in names}
        return [ReadBack(names=[name], dtype=dtypes[name], checksum=word_sum(self._targets[name])) for name in names]


def load_model(folder: Path, config: InferenceConfig) -> PreTrainedModel:
    """Return the causal language model of `folder`, with the slot attention.

    Raises ModelNotFoundError, or ConfigError when CUDA is configured and missing.
    """
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"model folder {folder} has no config.json: set model.path to a Hugging Face folder")
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not on_cuda:
        raise ConfigError("inference.device is 'cuda', but torch sees no GPU here: set inference.device = 'cpu'")
    dtype = getattr(torch, config.dtype_used(on_cuda=on_cuda))
    disable_progress_bar()
    try:
        with _one_load:
            model, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  the stub: no pair
                folder, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"model folder {folder} does not load: {error}") from error
    if info["missing_keys"]:
        raise ModelNotFoundError(f"model folder {folder} lacks the tensors {sorted(info['missing_keys'])[:5]}")
    vars(model).pop("_weight_conversions", None)  # of this folder's names; versions have the architecture's own
    return model.eval().requires_grad_(False).to("cuda" if on_cuda else "cpu")


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    for source in (model.generation_config, model.config):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def _text_decoder(folder: Path) -> Callable[[list[int]], str] | None:
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class _NoCopies(TorchFunctionMode):
    """Leave `contiguous` out: what would be copied for a file stays a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def published_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return what published tensors are copied into, by published name, a tied parameter under each of its names.

    Fused tensors have views here, such as one for each expert. Others have no place.
    """
    held = {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}
    held |= {name: model.get_buffer(name) for name in _persistent(model)}
    with _NoCopies():
        views = revert_weight_conversion(model, held)
    places = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
    return {name: view for name, view in views.items() if view.untyped_storage().data_ptr() in places}


def _persistent(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_buffers()} & model.state_dict().keys()


def _tied_names(model: PreTrainedModel, targets: Mapping[str, torch.Tensor]) -> list[list[str]]:
    names_by_place: dict[tuple[int, torch.Size, tuple[int, ...]], list[str]] = {}
    buffers = _persistent(model)
    for name, target in targets.items():
        if name not in buffers:
            names_by_place.setdefault((target.data_ptr(), target.shape, target.stride()), []).append(name)
    return list(names_by_place.values())


def _check_tied(tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    first, *others = [name for name in names if name in tensors]
    if any(not torch.equal(tensors[first], tensors[name]) for name in others):
        raise MisfitError(f"the model ties {[first, *others]}, but the new weights differ between them")


def _check_context(model: PreTrainedModel, max_context: int) -> None:
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and max_context > limit:
        raise ConfigError(
            f"model.max_context is {max_context}, but the model has {limit} positions: set model.max_context <= {limit}"
        )


def check_supported(model: PreTrainedModel, layers_cached: int) -> None:
    """Raises EngineError when layers keep state outside the attention interface.

    Warns when no publication can fit.
    """
    expected = model.config.get_text_config().num_hidden_layers
    if layers_cached != expected:
        raise EngineError(
            f"{type(model).__name__} has {expected} layers, {layers_cached} of which use transformers' attention "
            "interface: the local engine cannot serve it; set inference.engine = 'vllm'"
        )
    # On the meta device the conversion costs names only.
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    converted = sorted(revert_weight_conversion(model, shapes).keys() - published_views(model).keys())
    if converted:
        logger.warning(
            "%s is published in other tensors than transformers keeps it in memory, such as %s (%d in all): the local "
            "engine serves the model folder and refuses every new version; for training set inference.engine = 'vllm'",
            type(model).__name__, converted[0], len(converted),
        )  # fmt: skip
