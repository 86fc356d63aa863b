"""The gateway between environments and inference nodes. Read gateway.py first."""

from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.records import GenerationRecord

__all__ = ["Gateway", "GenerationRecord"]
