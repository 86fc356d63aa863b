"""A model by its id on the Hugging Face Hub: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

The only store is the cache of huggingface_hub. A model that is complete there is used as it is, without a request,
also when the Hub has a newer commit. Another machine has a cache of its own and may read another commit: only
`@REVISION` with a commit rules that out. HF_HUB_OFFLINE, HF_TOKEN, HF_HOME and HF_ENDPOINT mean what they mean to
huggingface_hub, which is imported inside the functions: that takes a second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, Self

from composer_prime.errors import ComposerError, ModelNotFoundError
from composer_prime.host import free_bytes

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_DESCRIPTION = ["config.json", "tokenizer_config.json", "chat_template.jinja"]
"""The files that a plan reads; some hundred kilobytes at most."""
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors"]


class HubModel(NamedTuple):
    """A model on the Hub."""

    id: str
    revision: str
    """A branch, a tag or a commit."""

    @classmethod
    def named(cls, path: str) -> Self | None:
        """Return the model that `path` names; None if it is not an id, or names a folder."""
        match = _ID.fullmatch(path)
        if match is None or Path(match[1]).parent.is_dir() or match[1].startswith("tiny/"):
            return None
        return cls(match[1], match[2] or "main")

    def cached(self) -> Path | None:
        """Return the folder of the newest commit in the cache, without a request. It may lack files."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, "config.json", revision=self.revision)
        return Path(found).parent if isinstance(found, str) else None

    def missing_bytes(self) -> int:
        """Ask the Hub how much there is to download. Raises ModelNotFoundError, also when the disk is too small."""
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
        """Fetch config.json and the chat template only. Return their folder. Raises ModelNotFoundError."""
        return self.cached() or Path(self._snapshot(_DESCRIPTION))

    def download(self) -> Path:
        """Fetch everything that is missing. Return the folder. Raises ModelNotFoundError."""
        self.missing_bytes()
        # The weights come last: where they are complete, so is the rest.
        self._snapshot(_SMALL)
        return Path(self._snapshot([*_SMALL, *_WEIGHTS]))

    def _snapshot(self, names: list[str], *, dry_run: bool = False) -> Any:
        """Download the files of these names, and return their folder; return what is missing with `dry_run`."""
        from huggingface_hub import snapshot_download

        try:
            return snapshot_download(
                self.id, revision=self.revision, allow_patterns=names, ignore_patterns=["*/*"], dry_run=dry_run
            )
        except ComposerError:
            raise
        except Exception as error:  # Each layer has its own: huggingface_hub, httpx, hf_xet, the operating system.
            raise ModelNotFoundError(self._refusal(error)) from None

    def _refusal(self, error: BaseException) -> str:
        """Return what went wrong, and what to do."""
        from huggingface_hub import errors

        if isinstance(error, errors.DryRunError) and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, errors.GatedRepoError):
            return f"{self.id} is a gated model: accept its terms on its page, then run `hf auth login` or set HF_TOKEN"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.id} on the Hub has no revision {self.revision!r}: name a branch, a tag or a commit after @"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"model.path is {self.id!r}: there is no such folder, and the Hub shows no such model. Correct the "
                "name; a private model needs `hf auth login` or HF_TOKEN"
            )
        while (below := error.__cause__ or error.__context__) is not None:
            error = below
        reason, name = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", self.id.rpartition("/")[2]
        return (
            f"model.path is {self.id!r}, there is no such folder, and no download to {_cache()} ({reason}): "
            f"repeat the command later, what was fetched stays; or run `hf download {self.id} --local-dir {name}` on a "
            f"machine with a network, copy the folder {name} here, and set model.path to it"
        )


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
