"""The swarm: machines that others own serve a run, and are checked. Other folders import this module only.

invite.py          the string that lets a machine join
admission.py       which keys may connect, and what a node that enrolls gets
trust.py           what is believed of one node, and how an audit changes that (read first)
audits.py          answers that wait for an audit, and who checks them
node_commands.py   the nodes of a run from the command line, over loopback
"""

from orchestrator.swarm.admission import Admission, ServedFiles
from orchestrator.swarm.audits import Auditors, Audits
from orchestrator.swarm.trust import NodeTrust

__all__ = ["Admission", "Auditors", "Audits", "NodeTrust", "ServedFiles"]
