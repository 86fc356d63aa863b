"""`composer export RUN|MODEL -o FOLDER`: a trained model for other programs, as a Hugging Face folder or a GGUF file.

The final model of a run has its low-rank adapters merged already (trainer/weights/publish.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_prime.cli.eval_command import model_folder
from composer_prime.errors import ConfigError
from composer_prime.model_source import check_model_folder, resolve_model

DTYPES = ("float32", "float16", "bfloat16")


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    folder, target = resolve_model(model_folder(options.model)), options.output
    is_file = target.suffix == ".gguf"
    if target.exists() and (is_file or not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already: name another place, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    from composer_prime.integrations.model_export import exported_from, write_model

    notes = []
    if is_file:
        from composer_prime.integrations.gguf_file import write_gguf

        try:
            notes = write_gguf(folder, target, options.dtype or "float16")
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    else:
        write_model(folder, target, dtype=options.dtype, shard_size=options.shard_size)
        check_model_folder(target, str(target))
    written = [target] if is_file else sorted(target.iterdir())
    size = sum(path.stat().st_size for path in written if path.is_file())
    print(f"wrote {exported_from(folder)} to {target}: {size / 1e6:,.1f} MB")
    print("\n".join(f"note: {note}" for note in notes), end="\n" if notes else "")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer export",
        description="Write a trained model for other programs.",
        epilog="examples:  composer export outputs/a1 -o a1-model --dtype bfloat16\n"
        "           composer export outputs/a1 -o a1.gguf        (Qwen2 and Qwen3; extra gguf)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run directory, model folder, Hub id, tiny, or smollm2")
    parser.add_argument("-o", "--output", type=Path, required=True, help="new folder, or a file that ends in .gguf")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: as stored; GGUF: float16)")
    parser.add_argument("--shard-size", default="5GB", help="largest weight file (default 5GB)")
    return parser
