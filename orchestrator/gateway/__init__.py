"""The gateway between environments and inference nodes. Read gateway.py first.

http -> generation -> routing -> nodes, and link between routing and the nodes' sockets.
"""

from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.generation import GenerationRecord

__all__ = ["Gateway", "GenerationRecord"]
