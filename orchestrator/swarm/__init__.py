"""The swarm: machines that others own serve a run, and are checked. Other folders import this module only.

invite.py          the string that lets a machine join
admission.py       which keys may connect, and what a node that enrolls gets
trust.py           what is believed of one node, and how an audit changes that (read first)
audits.py          answers that wait for an audit; auditors.py has who checks them
accounts.py        what each node did and costs, on disk and after a restart
node_control.py    drain and ban in the running orchestrator
node_commands.py   the same from the command line, over loopback
"""

from orchestrator.swarm.accounts import NodeAccounts
from orchestrator.swarm.admission import Admission
from orchestrator.swarm.auditors import Auditors
from orchestrator.swarm.audits import Audits
from orchestrator.swarm.node_control import NodeControl
from orchestrator.swarm.trust import NodeTrust

__all__ = ["Admission", "Auditors", "Audits", "NodeAccounts", "NodeControl", "NodeTrust"]
