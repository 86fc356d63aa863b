"""Which answers of which nodes are audited, and what follows: shares, quarantine, dropped answers.

trust.py   what the orchestrator believes of one node, and how an audit changes that (read first)
audits.py  answers that wait for an audit, and the link to the auditors, which hold the model
"""
