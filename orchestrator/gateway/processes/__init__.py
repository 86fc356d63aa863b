"""Gateway processes: several that serve HTTP in front of one router. Read router_end.py first."""

from orchestrator.gateway.processes.messages import ProcessSettings
from orchestrator.gateway.processes.router_end import GatewayProcesses

__all__ = ["GatewayProcesses", "ProcessSettings"]
