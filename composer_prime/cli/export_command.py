"""`composer export RUN|MODEL -o FOLDER`: a trained model for other programs, as a Hugging Face folder."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from composer_prime.errors import ConfigError
from composer_prime.model_source import check_model_folder, model_folder, resolve_model
from composer_prime.run.run_dir import RunDir

DTYPES = ("float32", "float16", "bfloat16")
_BESIDE = ("chat_template.jinja", "generation_config.json", "README.md", "LICENSE")
"""Files of a model folder that loading and saving may not carry over."""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="composer export",
        description="Write a trained model as a Hugging Face folder for other programs.",
        epilog="example:  composer export outputs/a1 --step 40 -o a1-step-40 --dtype bfloat16",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run directory, model folder, Hub id, tiny, smollm2")
    parser.add_argument("-o", "--output", type=Path, required=True, help="new folder")
    parser.add_argument("--step", type=int, help="this step's checkpoint instead of the final model")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: as stored)")
    options = parser.parse_args(words)
    target = options.output
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name another place, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    if options.step is None:
        _write_model(resolve_model(model_folder(options.model)), target, options.dtype)
        return 0
    run_dir = _run_with_checkpoint(options.model, options.step)
    from trainer.weights.checkpoint import write_checkpoint_model

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as scratch:
        folder = Path(scratch) / "model"
        write_checkpoint_model(run_dir, options.step, folder)
        _write_model(folder, target, options.dtype)
    return 0


def _run_with_checkpoint(run: str, step: int) -> RunDir:
    """Return the run directory. Raises ConfigError without a checkpoint of `step`."""
    run_dir = RunDir(Path(run))
    if not run_dir.config.is_file():
        raise ConfigError(f"--step {step}: {run} is no run directory, and only runs have checkpoints: omit --step")
    steps = run_dir.complete_checkpoints()
    if step not in steps:
        kept = ", ".join(map(str, steps)) or "none"
        raise ConfigError(
            f"--step {step}: {run} keeps checkpoints of step {kept}; trainer.checkpoint.keep sets how many stay"
        )
    return run_dir


def _write_model(folder: Path, target: Path, dtype: str | None) -> None:
    """Write the model and tokenizer of `folder`. Without a dtype the stored one stays."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored = getattr(torch, dtype) if dtype else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored, local_files_only=True)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)
    for file in _BESIDE:
        if (folder / file).is_file() and not (target / file).exists():
            shutil.copyfile(folder / file, target / file)
    check_model_folder(target, str(target))
    size = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    print(f"wrote {target}: {size / 1e6:,.1f} MB")
