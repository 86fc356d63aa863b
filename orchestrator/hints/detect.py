"""Where own detectors find `error_turn`."""

from orchestrator.hints.generate import error_turn

__all__ = ["error_turn"]
