"""The web server: loopback hosts only, GET only, no path out of the found runs, no cached surprise, live."""

import http.client
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from composer_prime.cli.view_command import DEMO
from composer_prime.monitor.events import EventFile
from composer_prime.monitor.metrics_file import MetricsFile
from composer_prime.run.run_dir import RunDir
from composer_prime.view.server import ASSETS, ViewServer
from composer_prime.view.workspace import Workspace
from tests.view.run_made import HOSTILE, batch, log_evaluation, log_step, make_run, write_lines


@contextmanager
def serving(folder) -> Iterator[ViewServer]:
    server = ViewServer(Workspace([folder]), 0)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(tmp_path):
    make_run(tmp_path / "outputs" / "a1", steps=3)
    with serving(tmp_path / "outputs") as server:
        yield server


def request(server: ViewServer, path: str, *, method: str = "GET", **headers: str):
    """Return (status, headers, body) of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def ask(server: ViewServer, path: str):
    status, _, body = request(server, path)
    assert status == 200, body
    return json.loads(body)


# It listens on loopback, and a request by another name (DNS rebinding) is refused.
def test_only_loopback_names_are_served(server):
    assert server.server_address[0] == "127.0.0.1"
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil.example"):
        assert request(server, "/api/runs", Host=host)[0] == 403
    for host in ("127.0.0.1", "localhost:9999", "[::1]:8410", "LOCALHOST"):
        assert request(server, "/api/runs", Host=host)[0] == 200


# Nothing can be written: every method but GET and HEAD is refused.
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get(server, method):
    assert request(server, "/api/runs", method=method)[0] == 501


# No path and no name leads to a file that is no part of the page: keys and logs of the run stay where they are.
@pytest.mark.parametrize(
    "path",
    [
        "/../config.json", "/%2e%2e/%2e%2e/etc/passwd", "/a1/keys/node.token", "/assets/../server.py", "/server.py",
        "/api/run?run=../outputs/a1", "/api/run?run=/etc", "/api/run?run=", "/api/rollout?run=a1&id=..%2f..%2fconfig",
        "/api/rollouts?run=a1&step=1e3", "/api/evaluation?run=nope", "/api/keys", "//etc/passwd",
    ],
)  # fmt: skip
def test_no_way_out_of_the_runs(server, path):
    status, _, body = request(server, path)
    assert status == 404 and b"root:" not in body and b"def " not in body


# Every answer forbids inline scripts, framing and other origins; text of a run leaves as JSON only. A question about
# an answer alone gets its headers.
def test_headers(server):
    status, headers, nothing = request(server, "/", method="HEAD")
    assert (status, nothing) == (200, b"") and int(headers["Content-Length"]) > 100
    for path in ("/", "/main.js", "/api/run?run=a1", "/api/rollout?run=a1&kind=step&step=1&id=g000002-0", "/nope"):
        _, headers, body = request(server, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["Access-Control-Allow-Origin"] is None
        if HOSTILE.encode()[:20] in body:
            assert headers["Content-Type"] == "application/json; charset=utf-8"


# The page needs nothing from the network: no file of it names another host.
def test_the_page_is_whole():
    for path in ASSETS.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "innerHTML" not in text and "eval(" not in text


# The page is live: what a run appends is in the next answer.
def test_a_running_run_is_followed(server, tmp_path):
    run_dir = RunDir(tmp_path / "outputs" / "a1")
    assert ask(server, "/api/run?run=a1")["step"] == 3
    write_lines(run_dir.rollouts(4), batch(4))
    log_step(MetricsFile(run_dir.metrics, "trainer"), 4)
    run = ask(server, "/api/run?run=a1")
    assert run["step"] == 4 and run["figures"]["columns"]["reward/mean"][-1] == pytest.approx(0.28)
    assert ask(server, "/api/rollouts?run=a1")["rows"][0]["step"] == 4


# A run that cannot be read is one answer with its error; the others go on.
def test_a_broken_run_breaks_nothing_else(server, tmp_path):
    broken = make_run(tmp_path / "outputs" / "broken", steps=2)
    (broken.root / "costs.jsonl").write_text('{"kind": "settled"}\n')
    broken.metrics.write_text('{"step": 1, "waiting_for": 3, "loss/total": "nan"}\n{"step": "no"}\n')
    with serving(tmp_path / "outputs") as other:
        assert "costs.jsonl:1 is not a ledger line" in ask(other, "/api/run?run=broken")["costs"]["problem"]
        assert {row["id"] for row in ask(other, "/api/runs")["runs"]} == {"a1", "broken"}


# Events stand on the page with their place; repetitions are one event.
def test_events_are_shown(server, tmp_path):
    file = EventFile(RunDir(tmp_path / "outputs" / "a1"), "orchestrator")
    for count in (1, 10):
        file.write("failure", "the box broke", level="warning", same_as="box", where="env.py:3", count=count)
    shown = [event for event in ask(server, "/api/run?run=a1")["events"] if event["kind"] == "warning"]
    assert [(event["text"], event["where"]) for event in shown] == [("the box broke (10 times)", "env.py:3")]


# The verdict waits for every evaluation, however slowly the index takes in the other files.
def test_the_verdict_is_of_all_evaluations(tmp_path):
    run_dir = make_run(tmp_path / "outputs" / "a1", steps=3)
    for step in range(4, 40):
        log_evaluation(run_dir, step, solved=8)
    workspace = Workspace([tmp_path / "outputs"])
    run = workspace.run({"run": "a1"})
    assert "(0.250 after step 0, 1.000 after step 39)" in run["verdict"]["text"]
    assert [point.step for point in run["evaluations"]] == [0, 3, *range(4, 40)]
    assert run["trained_tokens"] == 3000


# The clusters of a joint run name their shared folder, and a round is one entry however many steps repeat it.
def test_rounds_of_a_joint_run(tmp_path):
    for peer in ("a", "b"):
        run_dir = make_run(tmp_path / "outputs" / "joint" / peer, steps=4, diloco={"peer_id": peer})
        trainer = MetricsFile(run_dir.metrics, "trainer")
        for step, outer_step in ((1, 1), (2, 1), (3, 2), (4, 3)):
            peers = {f"diloco/{name}/inner_steps": 2 for name in ("a", "b")[: 1 + (outer_step != 2)]}
            trainer.log(
                step, {"diloco/outer_step": outer_step, "diloco/sync_s": 0.5, "diloco/bytes_sent": 1e6, **peers}
            )
    workspace = Workspace([tmp_path / "outputs"])
    assert {row["id"]: row["joint"] for row in workspace.run_list()["runs"]} == {"joint/a": "joint", "joint/b": "joint"}
    rounds = workspace.run({"run": "joint/a"})["joint_rounds"]
    assert [(each["round"], each["step"], sorted(each["peers"])) for each in rounds] == [
        (1, 1, ["a", "b"]),
        (2, 3, ["a"]),
        (3, 4, ["a", "b"]),
    ]


# Each node has a row with what it cost and how it stands.
def test_nodes_have_rows(tmp_path):
    make_run(tmp_path / "outputs" / "a1", steps=4)
    nodes = Workspace([tmp_path / "outputs"]).run({"run": "a1"})["nodes"]
    rows = {row["name"]: row for row in nodes}
    assert rows["node-0"]["usd_per_million"] == 6.25 and rows["node-0"]["totals"]["trained_tokens"] == 8000
    assert rows["node-1"]["usd_per_million"] is None and rows["node-1"]["state"] == "draining"


# The run of --demo is a finished one with a verdict, and small.
def test_the_demo_is_a_whole_run(tmp_path):
    shutil.unpack_archive(DEMO, tmp_path)
    workspace = Workspace([tmp_path])
    [row] = workspace.run_list()["runs"]
    run = workspace.run({"run": row["id"]})
    assert run["state"] == "finished" and len(run["evaluations"]) == 2 and DEMO.stat().st_size < 1_000_000
    shown = workspace.rollouts({"run": row["id"]})["rows"]
    assert all(each["question"] and each["expected"] for each in shown)
