"""Masking of secrets, with the Public Suffix List, which the extra `traces` installs."""

from importlib.util import find_spec

from composer_prime.console import install_command
from composer_prime.errors import ConfigError

if find_spec("publicsuffixlist") is None:
    need = "sessions are masked with publicsuffixlist, which is not installed"
    raise ConfigError(f"{need}: run {install_command('traces')}")
