"""Masking of secrets, with the Public Suffix List, which the extra `traces` installs."""

from importlib.util import find_spec

from composer_prime.errors import ConfigError

if find_spec("publicsuffixlist") is None:
    raise ConfigError("sessions are masked with publicsuffixlist, which is not installed: run `uv sync --extra traces`")
