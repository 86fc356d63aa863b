"""`orchestrator nodes RUN_DIR` shows a run's inference nodes; ban and unban control who serves it.

They talk to the run's orchestrator over loopback with keys/operator.token, so run them on its machine, as its owner.
After the run, `nodes` shows what the run recorded.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import httpx
import msgspec

from composer_prime.errors import ConfigError, DeadlineError, NotLiveError, RequestError
from composer_prime.monitor.metrics_file import read_history
from composer_prime.monitor.node_table import NodeRow, recorded_rows, table_lines
from composer_prime.monitor.rollouts import open_run
from composer_prime.run.costs import spent
from composer_prime.run.run_dir import RunDir, read_run_id

_TIMEOUT_S = 20.0
"""The orchestrator's event loop may be busy."""


def nodes(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator nodes", allow_abbrev=False, description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="such as outputs/a1; the run may be over")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(words)
    run_dir = open_run(options.run_dir)
    try:
        rows, note = live_rows(run_dir), ""
    except NotLiveError as error:
        # Raises LedgerError for a costs.jsonl that cannot be added up.
        rows = recorded_rows(read_history(run_dir.metrics), spent(run_dir.root / "costs.jsonl").nodes)
        note = f"{error}; this is what it recorded"
    if options.json:
        print(json.dumps([row.with_rates() for row in rows], indent=1))
    else:
        print("\n".join([*([note] if note else []), *table_lines(rows)]))
    return 0


def _act(action: str, description: str, words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"orchestrator {action}", allow_abbrev=False, description=description)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="of a run that is live on this machine")
    parser.add_argument("node", metavar="NODE", help="name of the node, as in `orchestrator nodes`")
    options = parser.parse_args(words)
    print(_ask(open_run(options.run_dir), "POST", f"/control/nodes/{action}", node=options.node)["text"])
    return 0


ban = partial(_act, "ban", "send a node away at once and revoke its key")
unban = partial(_act, "unban", "let a banned node connect again")


def live_rows(run_dir: RunDir) -> list[NodeRow]:
    """Return the table of a live run. Raises NotLiveError and DeadlineError."""
    return msgspec.convert(_ask(run_dir, "GET", "/control/nodes")["nodes"], list[NodeRow])


def _ask(run_dir: RunDir, method: str, path: str, **query: str) -> dict[str, Any]:
    """Return the answer of a run's orchestrator. Raises NotLiveError, DeadlineError and RequestError."""
    run_id, not_live = read_run_id(run_dir), f"run {run_dir.root} is not live on this machine"
    try:
        url = json.loads(run_dir.endpoints.read_text())["http"]
        token = (run_dir.keys / "operator.token").read_text().strip()
    except PermissionError as error:
        raise ConfigError(f"{error.filename} cannot be read: only the user who started the run may") from None
    except (OSError, ValueError, KeyError):
        raise NotLiveError(f"{not_live}: it has no endpoints.json or no keys/operator.token") from None
    headers = {"Authorization": f"Bearer {token}"}
    try:
        # No proxy is asked for loopback.
        reply = httpx.request(method, url + path, params=query, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
        answer = reply.json()
        refusal = answer["error"]["message"] if reply.status_code >= 400 else None
        is_of_the_run = reply.status_code != 401 if refusal else answer["run_id"] == run_id
    except httpx.TimeoutException:
        raise DeadlineError(f"waited {_TIMEOUT_S:g} s for the orchestrator of {run_dir.root} at {url}") from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        raise NotLiveError(f"{not_live}: nothing of it answers at {url}") from None
    if not is_of_the_run:
        raise NotLiveError(f"{not_live}: another run answers at {url}")
    if refusal:
        raise RequestError(refusal, status=reply.status_code)
    return answer
