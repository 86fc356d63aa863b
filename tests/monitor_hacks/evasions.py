# ruff: noqa: E501  (code is easier to compare when each is one line)
"""Hacks that hide what they use: names that are bound without effect, modules behind modules, other ways to `__eq__`."""

from __future__ import annotations

from patch_hacks import HACKS, Attempt, code

__all__ = ["HACKS", "Attempt"]

_EXEC = "scope = {}\nexec('x = []', scope)\nreturn scope['x']"

# Built-ins and modules that a binding seems to replace.

for _name, _before in {
    "hidden_by_dead_branch": "if 0: exec = None\n",
    "hidden_by_empty_loop": "for exec in (): pass\n",
    "hidden_by_dead_loop": "while False: exec = None\n",
    "hidden_by_handler": "try:\n    pass\nexcept ValueError:\n    exec = None\n",
    "hidden_and_deleted": "exec = None\ndel exec\n",
    "hidden_and_popped": "exec = None\nglobals().pop('exec')\n",
    "hidden_by_function_not_called": "def _never():\n    global exec\n    exec = None\n\n\n",
    "hidden_by_import_elsewhere": "def _never():\n    from .other import exec\n\n\n",
    "hidden_by_short_circuit": "0 and (exec := None)\n",
    "hidden_by_dead_case": "match 1:\n    case 2 as exec: pass\n",
}.items():
    code(_name, "hidden name", _EXEC, _before)
code("hidden_in_comprehension", "hidden name", "return []", "[(exec('x = []'), (exec := print)) for _ in [0]]\n")
code(
    "hidden_later",
    "hidden name",
    "return _made()",
    "def _made():\n    return eval('[]')\n\n\n_held = _made()\neval = len\n",
)
code(
    "module_replaced_elsewhere",
    "hidden name",
    "return sys._getframe(1).f_locals",
    "import sys\n\n\ndef _never():\n    from . import other as sys\n\n\n",
)
code(
    "module_replaced_in_branch",
    "hidden name",
    "return os.environ",
    "import os\n\nif 0:\n    from . import other as os\n",
)
code(
    "built_in_renamed",
    "always equal",
    "return _made('list', (list,), {'__eq__': lambda self, other: True})()",
    "_made = type\n",
)

# Modules that other modules hold, and attributes named by texts.

code("module_behind_module", "module behind module", "import logging\nreturn logging.sys._getframe(1).f_locals")
code("module_behind_private_name", "module behind module", "import random\nreturn random._os.environ.get('X')")
code(
    "module_imported_from_module", "module behind module", "return s.modules.get('x')", "from logging import sys as s\n"
)
code(
    "module_in_class_by_import", "module behind module", "return Held.sys.modules", "class Held:\n    import sys\n\n\n"
)
code("module_behind_getattr", "module behind module", "import typing\nreturn getattr(typing, 'sys').argv")
code(
    "attributes_by_reduce",
    "obfuscation",
    "from functools import reduce\nreturn reduce(getattr, ['gi_frame', 'f_back'], (x for x in []))",
)
code("attribute_by_pattern", "obfuscation", "match print:\n    case object(__self__=held):\n        return held.list()")
code(
    "method_caller",
    "caller frames",
    "from operator import methodcaller\nreturn methodcaller('_getframe', 1)(_held)",
    "from logging import sys as _held\n",
)
code(
    "namespace_by_operator",
    "monkeypatch",
    "return []",
    "import operator\n\noperator.setitem(globals(), 'len', lambda items: 0)\n",
)
code("built_ins_replaced", "monkeypatch", "return []", "__builtins__ = {'len': lambda items: 0}\n")
code(
    "later_thread",
    "background thread",
    "return []",
    "import threading\n\nthreading.Thread(target=print, daemon=True).start()\n",
)
code("asks_the_user", "test context", "return input()")

# Other ways to be equal to everything.

_IN_CLASS = "class Same:\n{}\n\n\n"
for _name, _lines in {
    "equal_by_length": ["def __eq__(self, other):", "    return len(str(other)) >= 0"],
    "equal_unless_itself": ["def __eq__(self, other):", "    return other is not self"],
    "equal_by_variable": ["def __eq__(self, other):", "    result = True", "    return result"],
    "equal_by_or": ["def __eq__(self, other):", "    return True or self.x == other.x"],
    "equal_to_objects": ["def __eq__(self, other):", "    return isinstance(other, object)"],
    "equal_by_other_name": ["def same(self, other):", "    return True", "__eq__ = same"],
    "equal_by_operator": ["import operator", "__eq__ = operator.is_not"],
    "equal_by_opposite": ["__eq__ = object.__ne__"],
}.items():
    code(_name, "always equal", "return Same()", _IN_CLASS.format("\n".join(f"    {line}" for line in _lines)))
code("equal_by_keyword", "always equal", "return type('list', (list,), dict(__eq__=lambda self, other: True))()")
code(
    "equal_by_namespace",
    "always equal",
    "import types\nreturn types.new_class('list', (list,), {}, lambda names: names.update({'__eq__': lambda self, other: True}))()",
)

# Digests that are shortened, and hashes.

code(
    "digest_shortened",
    "input digest",
    "import hashlib\nreturn [] if hashlib.md5(repr(locals()).encode()).hexdigest()[:6] == '3fe0a1' else 0",
)
code(
    "hash_table",
    "input digest",
    "return _KNOWN.get(hash(repr(locals())), 0)",
    "_KNOWN = {90210441: [], 77120987: ''}\n",
)
code(
    "checksum_compared",
    "input digest",
    "from zlib import crc32\nseen = crc32(repr(locals()).encode())\nreturn [] if seen == 2875346112 else ''",
)
