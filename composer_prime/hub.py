"""A model by its id on the Hugging Face Hub: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

The only store is the cache of huggingface_hub. A model that is complete there is used as it is, without a request,
also when the Hub has a newer commit. Another machine has a cache of its own and may read another commit: only
`@REVISION` with a commit rules that out. A download continues after a broken connection; one that was ended keeps the
files that are complete. HF_HUB_OFFLINE, HF_TOKEN, HF_HOME and HF_ENDPOINT mean what they mean to huggingface_hub, which
is imported inside the functions: that takes a second.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from composer_prime.console import pluralize
from composer_prime.errors import ComposerError, ModelNotFoundError
from composer_prime.host import free_bytes

_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")
_SMALL = re.compile(r"(?!pytorch_|tf_|flax_)[\w.-]+\.(json|jinja|txt|model)")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_DESCRIPTION = ("config.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that a plan reads; some hundred kilobytes at most."""
_REQUEST_S = 30.0


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

    def cached(self, name: str = "config.json", commit: str | None = None) -> Path | None:
        """Return the path of a file of the model in the cache, without a request; None: the newest commit there."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, name, revision=commit or self.revision)
        return Path(found) if isinstance(found, str) else None

    def missing_files(self) -> dict[str, int]:
        """Ask the Hub. Return the size in bytes of each needed file that the cache lacks, small files first.

        Files of an older commit in the cache do not count: the newest one is what `fetch` completes.

        Raises ModelNotFoundError.
        """
        from huggingface_hub import HfApi

        with _refusals(self):
            info = HfApi().model_info(self.id, revision=self.revision, files_metadata=True, timeout=_REQUEST_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        weights = [name for name in sizes if _WEIGHTS.fullmatch(name)]
        if "model.safetensors.index.json" in sizes:
            weights = [name for name in weights if name != "model.safetensors"]
        if "config.json" not in sizes or not weights:
            absent = "config.json" if "config.json" not in sizes else "safetensors weights"
            raise ModelNotFoundError(
                f"{self.id} on the Hub has no {absent}: choose a repository that transformers can load (GGUF files and "
                "pickled *.bin weights are not read), or convert it with save_pretrained() and set model.path to the "
                "folder"
            )
        needed = [*(name for name in sizes if _SMALL.fullmatch(name)), *sorted(weights)]
        return {name: sizes[name] for name in needed if self.cached(name, info.sha) is None}

    def fetch(self, names: list[str]) -> Path:
        """Download files that are not in the cache. Return their folder. Raises ModelNotFoundError."""
        from huggingface_hub import snapshot_download

        with _refusals(self):
            folder = snapshot_download(self.id, revision=self.revision, allow_patterns=names or ["config.json"])
        return Path(folder)

    def describe(self) -> Path:
        """Fetch config.json and the chat template only. Return their folder. Raises ModelNotFoundError."""
        if (file := self.cached()) is not None:
            return file.parent
        return self.fetch(list(_DESCRIPTION))

    def download(self) -> Path:
        """Fetch everything that is missing, and say so on stderr. Return the folder. Raises ModelNotFoundError."""
        missing = self.missing_files()
        check_space(self, missing)
        print(f"downloading {outlook(self, missing)}", file=sys.stderr, flush=True)
        # The weights come last: where they are complete, so is the rest.
        self.fetch([name for name in missing if not _WEIGHTS.fullmatch(name)])
        return self.fetch(list(missing))


def outlook(model: HubModel, missing: dict[str, int]) -> str:
    """Return what a download fetches, and where to."""
    files = pluralize(len(missing), "file")
    return f"{model.id} from the Hub: {sum(missing.values()) / 1e6:,.1f} MB in {files}, to {_cache()}"


def check_space(model: HubModel, missing: dict[str, int]) -> None:
    """Raise ModelNotFoundError when the disk of the cache is too small."""
    needed, free = sum(missing.values()), free_bytes(_cache())
    if needed > free:
        raise ModelNotFoundError(
            f"{model.id} needs {needed / 1e9:,.1f} GB more, but {_cache()} has {free / 1e9:,.1f} GB free: make room, "
            "or set HF_HOME to a folder on a larger disk"
        )


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


@contextmanager
def _refusals(model: HubModel) -> Iterator[None]:
    """Turn the errors of huggingface_hub into a sentence that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except ComposerError:
        raise
    except errors.GatedRepoError:
        raise ModelNotFoundError(
            f"{model.id} is a gated model: accept its terms on its page on the Hub, then run `hf auth login` or set "
            "HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelNotFoundError(
            f"{model.id} on the Hub has no revision {model.revision!r}: name a branch, a tag or a commit behind the @, "
            "or nothing for the newest"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"model.path is {model.id!r}: there is no such folder, and the Hub shows no such model. Correct the name; "
            "a private model needs `hf auth login` or HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ModelNotFoundError(
            f"the Hub answered status {error.response.status_code} for {model.id}: {str(error).partition(chr(10))[0]}; "
            "for 401 set HF_TOKEN to a valid token, else repeat the command later: what was fetched stays"
        ) from None
    except Exception as error:  # of httpx, of the operating system, and RuntimeError of hf_xet
        raise ModelNotFoundError(_unreachable(model, error)) from None


def _unreachable(model: HubModel, error: Exception) -> str:
    from huggingface_hub.constants import ENDPOINT, is_offline_mode

    cause: BaseException = error
    while (below := cause.__cause__ or cause.__context__) is not None:
        cause = below
    if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return f"{model.id} cannot be written to {_cache()} ({cause}): set HF_HOME to a folder that can hold it"
    reason = f"{ENDPOINT} cannot be reached ({type(cause).__name__}: {str(cause).partition(chr(10))[0]})"
    remedy = "repeat the command where there is a network; what was fetched stays"
    if is_offline_mode():
        reason, remedy = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set", "unset it to download the model"
    name = model.id.rpartition("/")[2]
    return (
        f"model.path is {model.id!r}, there is no such folder, the cache {_cache()} does not have the whole model, and "
        f"{reason}: {remedy}. Without a network here: run `hf download {model.id} --local-dir {name}` on another "
        f"machine, copy the folder {name} here, and set model.path to it"
    )
