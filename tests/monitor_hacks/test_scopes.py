# ruff: noqa: E501  (cases are easier to compare when each is one line)
"""What names may mean: built-ins and imports are seen whatever a file binds without effect."""

import pytest

from orchestrator.coding.monitor.code_traits import traits


def rules(code: str) -> set[str]:
    return {each.rule for each in traits(code.encode(), frozenset({"core"}))}


# A name of an inner scope does not hide a built-in from what Python evaluates outside of it, or before it is bound.
@pytest.mark.parametrize(
    "code",
    [
        "def f(exec, _=exec('x')):\n    pass", "[eval for eval in eval('1')]", "def f(exec=exec):\n    exec('x')",
        "@eval\ndef f(eval):\n    pass", "@eval\ndef eval():\n    pass", "def f(eval) -> eval('1'):\n    pass",
        "def f(a: eval('1'), eval):\n    pass", "class A(exec('x')):\n    exec = 1", "exec = exec\nexec('x')",
        "def f(exec):\n    def g():\n        global exec\n        exec('x')",
        "try:\n    f()\nexcept ValueError as exec:\n    pass\nexec('x')",
        "[(exec('x'), (exec := print)) for _ in [0]]", "class exec:\n    exec('x')",
        "class A:\n    exec('x')\n    exec = 1",
    ],
)  # fmt: skip
def test_built_ins_are_seen_outside_a_scope(code):
    assert "dynamic-code" in rules(code)


# A binding of a module or a class hides no built-in where it may not have run, or was taken away again.
@pytest.mark.parametrize(
    "binding",
    [
        "if 0: exec = None", "if 1:\n    def exec(): pass", "while False: exec = None", "for exec in (): pass",
        "for _ in ():\n    import core as exec", "try:\n    pass\nexcept ValueError:\n    exec = None",
        "try:\n    1 / 0\n    exec = None\nexcept ZeroDivisionError:\n    pass", "0 and (exec := 1)", "exec: int",
        "match 1:\n    case 2 as exec: pass", "match 1:\n    case {'a': 1, **exec}: pass", "exec = 1\ndel exec",
        "def never():\n    global exec\n    exec = 1", "def never():\n    from .core import exec",
        "if 0: from .core import exec", "exec = 1\nglobals().pop('exec')", "exec = 1\nvars().clear()",
        "async def never():\n    async with x as exec: pass",
    ],
)  # fmt: skip
def test_bindings_without_effect_hide_no_built_in(binding):
    assert "dynamic-code" in rules(f"{binding}\nexec('x')")
    assert "dynamic-code" in rules(f"{binding}\n\ndef f():\n    exec('x')")
    inside = "\n".join(f"    {line}" for line in f"{binding}\nexec('x')".splitlines())
    assert "dynamic-code" in rules(f"class A:\n{inside}")


# A function may be called before the module binds a name; a built-in is seen there.
@pytest.mark.parametrize("binding", ["exec = None", "def exec(): pass", "from .core import exec"])
def test_a_later_binding_hides_no_built_in(binding):
    assert "dynamic-code" in rules(f"def f():\n    exec('x')\nf()\n{binding}")
    assert rules(f"{binding}\ndef f():\n    exec('x')") == set()


# A function may delete the module's name.
def test_a_deleted_name_hides_no_built_in():
    assert "dynamic-code" in rules("exec = 1\n\ndef gone():\n    global exec\n    del exec\n\ngone()\nexec('x')")


# What surely is bound, or is local to a function, is the file's own.
@pytest.mark.parametrize(
    "code",
    [
        "def exec(text):\n    return exec(text[1:]) if text else 0", "exec, eval = f()\nexec('x')\neval('y')",
        "exec: object = f()\nexec('x')", "class A:\n    exec = f\n    exec('x')", "from .core import open\nopen('x')",
        "def f():\n    if 0:\n        exec = 1\n    exec('x')", "def f(exec):\n    return lambda: exec('x')",
        "def f():\n    def g():\n        nonlocal exec\n        exec('x')\n    exec = 1", "[exec(1) for exec in f()]",
        "def f(exec):\n    class A:\n        exec('x')", "def f():\n    [(exec := g()) for _ in [0]]\n    exec('x')",
        "def f():\n    import core as exec\n    exec('x')",
    ],
)  # fmt: skip
def test_own_names_are_no_built_ins(code):
    assert rules(code) == set()


# An import in another scope, or one that never runs, does not give a module another meaning.
@pytest.mark.parametrize(
    "other",
    [
        "def g():\n    from . import core as sys",
        "if 0:\n    from . import core as sys",
        "class A:\n    import core as sys",
    ],
)
def test_imports_do_not_replace_modules(other):
    assert "caller-frames" in rules(f"import sys\n{other}\ndef f():\n    return sys._getframe(1)")
    assert "caller-frames" in rules(f"{other}\nimport sys\ndef f():\n    return sys._getframe(1)")
    assert rules("import sys\n\ndef f():\n    from . import core as sys\n    return sys.path") == set()


# A module that another one holds is the same module; so is an attribute that a text or a pattern names.
@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import logging\nlogging.sys._getframe(1)", "caller-frames"), ("from logging import sys as s\ns.modules", "test-context"),
        ("import random\nrandom._os.environ", "environment-read"), ("class A:\n    import sys\nA.sys.argv", "environment-read"),
        ("from . import core\ncore.sys.modules", "test-context"), ("import typing\ngetattr(typing, 'sys').argv", "environment-read"),
        ("reduce(getattr, ['f_back'], x)", "caller-frames"), ("match x:\n    case object(__globals__=g): pass", "obfuscation"),
        ("import typing\n(lambda m: m.x)(typing.sys)", "obfuscation"), ("__builtins__ = {}", "monkeypatch"),
        ("if 0:\n    from . import core as math\nimport math\nmath.isclose = f", "monkeypatch"), ("globals().update(x=1)", "obfuscation"),
        ("make = type\nmake('A', (), {'__bool__': f})", "always-equal"), ("s = setattr\ns(list, '__eq__', f)", "monkeypatch"),
    ],
)  # fmt: skip
def test_modules_behind_modules_are_seen(code, rule):
    assert rule in rules(code)


# Attributes and texts of the same name are usual.
@pytest.mark.parametrize(
    "code",
    [
        "def f(self):\n    return self.os", "def f(release):\n    release.os.name = 'linux'", "def f(x):\n    return x.sys.version",
        "NAMES = ['touch', 'mro', 'settings']", "def f(x):\n    return x.get('a').get('b').get('c')", "from .core import sys",
    ],
)  # fmt: skip
def test_usual_attributes_are_no_modules(code):
    assert rules(code) == set()
