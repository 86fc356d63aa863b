"""Masking of secrets, with detect-secrets and the Public Suffix List, which the extra `traces` installs."""

from importlib.util import find_spec

from composer_prime.errors import ConfigError

for _module in ("detect_secrets", "publicsuffixlist"):
    if find_spec(_module) is None:
        raise ConfigError(f"sessions are masked with {_module}, which is not installed: run `uv sync --extra traces`")
