"""The folder with tokenizer and chat template, and the errors of templates.

It is the model's, or one in the run directory where model.chat_template replaces the template.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jinja2

from composer_prime.errors import ConfigError

RENDER_ERRORS = (
    jinja2.TemplateError, LookupError, NotImplementedError, TypeError, ValueError, AssertionError, AttributeError,
)  # fmt: skip
"""Of renderers and chat templates, for messages that they cannot render."""
_SMALL_FILES = ("*.json", "*.model", "*.txt")


def chat_folder(model_dir: Path, template: Path | None, run_root: Path) -> Path:
    """Return the folder. Raises ConfigError for a `template` that cannot be read."""
    if template is None:
        return model_dir
    try:
        text = template.expanduser().read_text()
    except OSError as error:
        raise ConfigError(f"model.chat_template is {template}, which cannot be read: {error.strerror}") from None
    folder = run_root / "chat"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for pattern in _SMALL_FILES:
        for path in model_dir.glob(pattern):
            shutil.copyfile(path, folder / path.name)
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text()) if settings.exists() else {}
    values.pop("chat_template", None)
    settings.write_text(json.dumps(values, indent=2))
    (folder / "chat_template.jinja").write_text(text)
    # Neither the folder nor the model's published name may choose a renderer: the template counts.
    (folder / "renderer.json").unlink(missing_ok=True)
    model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model | {"_name_or_path": ""}))
    return folder
