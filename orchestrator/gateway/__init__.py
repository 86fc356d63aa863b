"""The gateway between environments and inference nodes. Read gateway.py first.

http -> routing -> nodes, and link between routing and the nodes' sockets. node_control is for the run's operator.
"""

from orchestrator.gateway.gateway import Gateway
from orchestrator.gateway.http import GenerationRecord

__all__ = ["Gateway", "GenerationRecord"]
