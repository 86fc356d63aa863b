"""The import place of `error_turn` for detectors of your own."""

from orchestrator.hints.generate import error_turn as error_turn
