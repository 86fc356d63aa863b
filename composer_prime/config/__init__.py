"""One TOML file describes a cluster; every role reads the same `Config` (see root.py, read first)."""

from composer_prime.config.root import Config

__all__ = ["Config"]
