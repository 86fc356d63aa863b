"""Parts by short name or import path, with settings."""

import pytest

from composer_prime.errors import ConfigError
from composer_prime.import_path import PartConfig, build_part, find_part

KNOWN = {"counter": "collections:Counter", "text": "textwrap:TextWrapper"}


# Both names lead to the same class, and settings are its arguments beside those given that it takes.
def test_names():
    assert find_part("text", KNOWN, "a.b") is find_part("textwrap:TextWrapper", {}, "a.b")
    wrapper = build_part("text", {"width": 7}, KNOWN, "a.b", {"tabsize": 3, "unknown": 1})
    assert (wrapper.width, wrapper.tabsize) == (7, 3)


@pytest.mark.parametrize(("name", "settings"), [("txt", {}), ("no_module:X", {}), ("json:no", {}), ("text", {"x": 1})])
def test_mistakes_name_the_setting(name: str, settings: dict[str, int]):
    with pytest.raises(ConfigError) as refused:
        build_part(name, settings, KNOWN, "a.b", {})
    assert "a.b" in str(refused.value) and name in str(refused.value)


def test_plain_name():
    assert PartConfig.model_validate("counter") == PartConfig(name="counter")
