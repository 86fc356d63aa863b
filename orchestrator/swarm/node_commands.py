"""`orchestrator nodes RUN_DIR` shows a run's inference nodes; drain, ban and unban control who serves it.

They talk to the run's orchestrator over loopback with keys/operator.token, so run them on its machine, as its owner.
After the run, `nodes` shows what the run recorded.
"""

from __future__ import annotations

import argparse
import json
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
"""For an answer of the orchestrator, whose event loop may be busy."""


class RunConnection:
    """A live run's orchestrator, on this machine."""

    def __init__(self, run_dir: RunDir) -> None:
        """Raises NotLiveError without an address or token of the orchestrator."""
        self.run_dir = run_dir
        self._run_id = read_run_id(run_dir)
        try:
            self._url = json.loads(run_dir.endpoints.read_text())["http"]
            self._token = (run_dir.root / "keys" / "operator.token").read_text().strip()
        except PermissionError as error:
            raise ConfigError(f"{error.filename} cannot be read: only the user who started the run may") from None
        except (OSError, ValueError, KeyError):
            raise self._not_live("it has no endpoints.json or no keys/operator.token") from None

    def nodes(self) -> list[NodeRow]:
        """Return the table as of now. Raises as `call` does."""
        return msgspec.convert(self.call("GET", "/control/nodes")["nodes"], list[NodeRow])

    def act(self, action: str, node: str) -> str:
        """Have the orchestrator do one of its ACTIONS to `node`, and return what happened. Raises as `call` does."""
        return self.call("POST", f"/control/nodes/{action}", node=node)["text"]

    def call(self, method: str, path: str, **query: str) -> dict[str, Any]:
        """Return the orchestrator's answer.

        Raises NotLiveError when the run is over, DeadlineError without an answer, RequestError for a refusal.
        """
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            with httpx.Client(timeout=_TIMEOUT_S, trust_env=False) as client:  # No proxy is asked for loopback.
                reply = client.request(method, self._url + path, params=query, headers=headers)
            answer = reply.json()
        except httpx.TimeoutException:
            raise DeadlineError(
                f"waited {_TIMEOUT_S:g} s for the orchestrator of {self.run_dir.root} at {self._url}"
            ) from None
        except (httpx.HTTPError, ValueError):
            raise self._not_live(f"nothing of it answers at {self._url}") from None
        if reply.status_code >= 400:
            error = answer.get("error") if isinstance(answer, dict) else None
            message = error.get("message") if isinstance(error, dict) else f"status {reply.status_code}"
            if reply.status_code == 401:
                raise self._not_live(f"another run answers at {self._url}")
            raise RequestError(str(message), status=reply.status_code)
        if answer.get("run_id") != self._run_id:
            raise self._not_live(f"another run answers at {self._url}")
        return answer

    def _not_live(self, why: str) -> NotLiveError:
        return NotLiveError(f"run {self.run_dir.root} is not live on this machine: {why}")


# -- commands ------------------------------------------------------------------------------------------------------


def nodes(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="orchestrator nodes", allow_abbrev=False, description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="such as outputs/a1; the run may be over")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(words)
    run_dir = open_run(options.run_dir)
    try:
        rows, note = RunConnection(run_dir).nodes(), ""
    except NotLiveError as error:
        rows, note = recorded(run_dir), f"{error}; this is what it recorded"
    if options.json:
        print(json.dumps([row.with_rates() for row in rows], indent=1))
    else:
        print("\n".join([*([note] if note else []), *table_lines(rows)]))
    return 0


def recorded(run_dir: RunDir) -> list[NodeRow]:
    """Return the rows of a run that is over. Raises LedgerError for a costs.jsonl that cannot be added up."""
    return recorded_rows(read_history(run_dir.metrics), spent(run_dir.root / "costs.jsonl").nodes)


def drain(words: list[str]) -> int:
    return _act("drain", words, "send a node no new requests, and stop it after it answered its current ones")


def ban(words: list[str]) -> int:
    return _act("ban", words, "send a node away at once and revoke its key")


def unban(words: list[str]) -> int:
    return _act("unban", words, "let a banned node connect again")


def _act(action: str, words: list[str], description: str) -> int:
    parser = argparse.ArgumentParser(prog=f"orchestrator {action}", allow_abbrev=False, description=description)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="of a run that is live on this machine")
    parser.add_argument("node", metavar="NODE", help="name of the node, as in `orchestrator nodes`")
    if action == "drain":
        parser.add_argument("--now", action="store_true", help="have other nodes finish what it has begun")
    options = parser.parse_args(words)
    action = "drain_now" if action == "drain" and options.now else action
    print(RunConnection(open_run(options.run_dir)).act(action, options.node))
    return 0
