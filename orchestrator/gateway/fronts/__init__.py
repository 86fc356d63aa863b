"""Several HTTP processes in front of one router. Read router_end.py first; front.py is the process."""

from orchestrator.gateway.fronts.router_end import Fronts, FrontSettings

__all__ = ["FrontSettings", "Fronts"]
