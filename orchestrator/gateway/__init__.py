"""The gateway between environments and inference nodes. Read gateway.py first.

http -> routing -> nodes, and link between routing and the nodes' sockets.
"""

from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.http import GenerationRecord

__all__ = ["Gateway", "GenerationRecord"]
