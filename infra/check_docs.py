"""Check that the files, links and settings that documentation names exist: python infra/check_docs.py"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from composer_prime.config.root import Config

ROOT = Path(__file__).resolve().parents[1]
_PAGES = ("*.md", "docs/**/*.md", "infra/**/*.md", "configs/**/*.toml", "examples/**/*.toml")
_FOLDERS = "composer_prime|orchestrator|inference|trainer|diloco|configs|tests|benchmarks|infra|docs|examples"
_PATH = re.compile(rf"(?<![\w/.-])((?:{_FOLDERS})/[\w/.-]+\.(?:py|md|toml|jsonl?|svg|jinja)|(?:{_FOLDERS})/[\w/-]+/)")
_LINK = re.compile(r"\]\(((?!https?:)[^)#\s]+)")
_SECTIONS = "run|model|monitor|inference|orchestrator|trainer|teachers|channels|diloco"
_SETTING = re.compile(rf"`(?:--)?((?:{_SECTIONS})(?:\.[\w-]+)+)(?=[` =])")


def has_setting(model: Any, names: list[str]) -> bool:
    """Return whether a dotted setting leads to a field, through optional sections and lists."""
    if not names:
        return True
    if isinstance(model, type) and issubclass(model, BaseModel):
        field = model.model_fields.get(names[0].replace("-", "_"))
        return field is not None and has_setting(field.annotation, names[1:])
    return any(has_setting(kind, names[names[0].isdigit() :]) for kind in get_args(model))


def problems(page: Path) -> list[str]:
    """Return what a page names that does not exist."""
    text = page.read_text()
    lines = [f"no file {name}" for name in sorted(set(_PATH.findall(text))) if not (ROOT / name).exists()]
    if page.suffix == ".md":
        lines += [f"broken link {link}" for link in _LINK.findall(text) if not (page.parent / link).exists()]
    for name in sorted(set(_SETTING.findall(text))):
        path = ROOT / name.replace(".", "/")
        is_file = name.endswith((".py", ".safetensors")) or path.exists() or path.with_suffix(".py").exists()
        if not is_file and not has_setting(Config, name.split(".")):
            lines.append(f"no setting {name}")
    return lines


def all_problems() -> list[str]:
    """Return one line for each name that leads nowhere."""
    pages = sorted({page for pattern in _PAGES for page in ROOT.glob(pattern)})
    return [f"{page.relative_to(ROOT)}: {line}" for page in pages for line in problems(page)]


if __name__ == "__main__":
    lines = all_problems()
    print("\n".join(lines) or "every file, link and setting exists")
    sys.exit(bool(lines))
