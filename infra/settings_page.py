"""Write the site's page of all settings from the classes of the configuration: a hook of mkdocs.

The classes are read as text, because the site is built without the product's packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "composer_prime"
_LIMITS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
Classes = dict[str, ast.ClassDef]


def on_files(files: Any, config: Any) -> Any:
    """Add the page to the site; mkdocs calls this."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "reference/settings.md", content=page()))
    return files


def page() -> str:
    """Return the page: a table of keys for each section, in the order of the file."""
    paths = sorted([*PACKAGE.glob("config/*.py"), *PACKAGE.glob("channels/*.py"), PACKAGE / "import_path.py"])
    found = [node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in found if node.bases}
    return "\n".join(["# All settings", *_section("", classes["Config"], classes)])


def _section(prefix: str, section: ast.ClassDef, classes: Classes) -> Iterator[str]:
    """Yield the table of a section's values, then its sections."""
    fields = {field.target.id: (field, text) for field, text in _fields(section, classes)}.values()
    inner = {field.target.id: _sections(field.annotation, classes) for field, _ in fields}
    if rows := [_row(field, text) for field, text in fields if not inner[field.target.id]]:
        yield from ("", f"## `[{prefix.rstrip('.')}]`", "", "| key | default | meaning |", "|---|---|---|", *rows)
    for name, sections in inner.items():
        for each in sections:
            yield from _section(f"{prefix}{name}.", each, classes)


def _fields(section: ast.ClassDef, classes: Classes) -> Iterator[tuple[Any, str]]:
    """Yield each field of a class and its parents with the text below it."""
    for base in section.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(classes[base.id], classes)
    for node, following in zip(section.body, [*section.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            said = following.value if isinstance(following, ast.Expr) else None
            yield node, " ".join(str(said.value).split()) if isinstance(said, ast.Constant) else ""


def _sections(annotation: ast.expr, classes: Classes) -> list[ast.ClassDef]:
    """Return the sections behind a key; none for a part, which may be a plain name too."""
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    return [] if {"str", "PartConfig"} & {*names} else [classes[name] for name in names if name in classes]


def _row(field: Any, text: str) -> str:
    value = field.value
    keywords = {}
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        value = keywords.get("default")
    limits = ", ".join(f"{sign} {ast.unparse(keywords[name])}" for name, sign in _LIMITS.items() if name in keywords)
    annotation = field.annotation
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[annotation, *_])):
            pass
    kind = f"`{ast.unparse(annotation)}`{limits and f' {limits}'}"
    default = f"`{ast.unparse(value)}`" if value is not None else ""
    cells = [f"`{field.target.id}`<br>{kind}", default, text]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
