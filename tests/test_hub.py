"""A model by its Hub id, from a server on loopback that has the few routes of the Hub that a download needs."""

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from composer_prime import model_source
from composer_prime.errors import ModelNotFoundError
from composer_prime.model_source import HubModel, described_model, model_ready, present_model, resolve_model

TINY = resolve_model("tiny")
COMMIT = "5" * 40
ID = "acme/small-model"


class Hub(ThreadingHTTPServer):
    """Serves one model. `asked` are the files that were sent, `cut` a file whose connection breaks half way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Routes)
        files = [path for path in TINY.iterdir() if path.is_file()]
        self.files = {path.name: path.read_bytes() for path in files}
        self.files |= {"pytorch_model.bin": b"pickle", "onnx/model.onnx": b"graph", "README.md": b"card"}
        self.asked: list[str] = []
        self.requests = 0
        self.cut = ""
        self.ranges: list[str] = []
        self.gated = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Routes(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests += 1
        path = urlsplit(self.path).path
        if path == "/api/models":
            self._json([{"id": ID, "modelId": ID}])
        elif path in (f"/api/models/{ID}", f"/api/models/{ID}/revision/main"):
            siblings = [{"rfilename": name, "size": len(body)} for name, body in self.server.files.items()]
            self._json({"id": ID, "modelId": ID, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/api/models/{ID}/tree/"):
            rows = self.server.files.items()
            self._json([{"type": "file", "path": name, "size": len(body), "oid": _tag(body)} for name, body in rows])
        elif path.startswith(f"/api/models/{ID}/revision/"):
            self._refuse(404, "RevisionNotFound")
        elif path.startswith(f"/{ID}/resolve/") and self.server.gated:
            self._refuse(403, "GatedRepo")
        elif path.startswith(f"/{ID}/resolve/"):
            self._file(path.split("/", 5)[5])
        else:
            self._refuse(401, "RepoNotFound")

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code})

    def _file(self, name: str) -> None:
        body = self.server.files[name]
        headers = {"ETag": f'"{_tag(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self._send(200, body, headers)
            return
        self.server.asked.append(name)
        start = 0
        if wanted := self.headers.get("Range"):
            self.server.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._send(206 if wanted else 200, body[start:], headers, cut=name == self.server.cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut

    def log_message(self, format: str, *args: object) -> None:
        pass


def _tag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The Hub as huggingface_hub sees it, and an empty cache."""
    server = Hub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    yield server
    server.shutdown()
    server.server_close()


def test_an_id_is_downloaded_once_and_only_the_needed_files(server: Hub) -> None:
    """The first use fetches config, tokenizer, template and safetensors; the next one sends no request at all."""
    assert present_model(ID) is None
    folder = resolve_model(ID)
    assert (folder / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    assert set(server.asked) == {path.name for path in folder.iterdir()}
    assert not {"pytorch_model.bin", "onnx/model.onnx", "README.md"} & set(server.asked)
    requests = server.requests
    assert resolve_model(ID) == present_model(ID) == folder
    assert model_ready(ID) is None
    assert server.requests == requests


def test_a_plan_says_what_it_would_download(server: Hub) -> None:
    """The plan names the model and its size, reads its shape, and leaves the weights where they are."""
    said = model_ready(ID)
    assert said is not None and ID in said and " MB" in said
    described = described_model(ID)
    assert described is not None and json.loads((described / "config.json").read_text())["model_type"]
    assert set(server.asked) <= {"config.json", "tokenizer_config.json", "chat_template.jinja"}
    assert present_model(ID) is None


def test_a_commit_between_plan_and_download_brings_all_files(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan fetched of the older commit is fetched again: a folder never lacks files that the cache has."""
    old = described_model(ID)
    monkeypatch.setattr(sys.modules[__name__], "COMMIT", "6" * 40)
    folder = resolve_model(ID)
    assert old is not None and (old.name, folder.name) == ("5" * 40, "6" * 40)
    assert (folder / "config.json").is_file() and present_model(ID) == folder


def test_a_download_that_broke_continues(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a broken connection the rest of a file is asked for; the next command asks for missing files only."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1_000_000)
    server.cut = "model.safetensors"
    with pytest.raises(ModelNotFoundError, match=ID):
        resolve_model(ID)
    assert server.ranges[0] == "bytes=1000000-"
    server.cut, server.asked = "", []
    assert (resolve_model(ID) / "model.safetensors").stat().st_size == len(server.files["model.safetensors"])
    assert server.asked == ["model.safetensors"]


def test_wrong_ids_are_named(server: Hub) -> None:
    """A typo, a revision, weights that cannot be read, a gated model: each message has the name."""
    with pytest.raises(ModelNotFoundError, match=r"acme/smal-model"):
        resolve_model("acme/smal-model")
    with pytest.raises(ModelNotFoundError, match="'v9'"):
        resolve_model(f"{ID}@v9")
    weights = server.files.pop("model.safetensors")
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        resolve_model(ID)
    server.files["model.safetensors"] = weights
    server.gated = True
    with pytest.raises(ModelNotFoundError, match="gated"):
        resolve_model(ID)


def test_without_a_network_the_message_says_how_to_bring_the_model(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command to run elsewhere has the model's id."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelNotFoundError, match=f"hf download {ID}"):
        model_ready(ID)


def test_a_cached_model_needs_no_network(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was downloaded once is used offline."""
    folder = resolve_model(ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(ID) == folder


def test_a_small_disk_is_named_before_the_download(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit names both sizes, also in a plan."""
    monkeypatch.setattr(model_source, "free_bytes", lambda path: 10)
    with pytest.raises(ModelNotFoundError, match="HF_HOME"):
        model_ready(ID)
    assert server.asked == []


def test_a_folder_is_never_an_id(server: Hub, tmp_path: Path) -> None:
    """A missing folder below one that exists is a missing folder, and nobody is asked for it."""
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelNotFoundError, match="models/mine"):
        resolve_model("models/mine")
    assert server.requests == 0
    assert HubModel.named("acme/small@v1.0") == ("acme/small", "v1.0")
