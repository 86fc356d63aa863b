"""Rented machines: offers of a provider, instances that start as nodes of a run, and the end of their billing.
composer_prime/run/rentals.py is the record in the run directory: what was started, before and after each call.

command.py        `orchestrator rent`: the command line, the table, the dry run
machines.py       start, status, stop, and the watch over a budget and the run
usefulness.py     which machines the run no longer needs
provider.py       what a provider must do, and which offers are taken
cli_providers.py  Vast.ai and Prime Intellect, through their command-line tools
http_providers.py RunPod and Lambda, through their documented HTTP interfaces
calls.py          one call to a provider: how it is made, printed, and how it fails
bootstrap.sh      what each machine runs first
"""
