"""Pushing to a hub: a loopback fake that speaks the upload protocol, honest and refusing."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading

import jax
import pytest

from envace_jax import cli
from envace_jax.config import UserError
from envace_jax.model import hub
from envace_jax.model.hf import save_params
from envace_jax.model.qwen3 import init_params
from envace_jax.model.spec import PRESETS

pytest.importorskip("huggingface_hub")


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Repository creation, upload modes, LFS batch and put, commit."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body, state = self.body(), self.server.state
        address = f"http://127.0.0.1:{self.server.server_port}"
        if state["refuse"]:
            self.answer({"error": "no rights"}, 403)
        elif self.path == "/api/repos/create":
            state["created"] = json.loads(body)
            self.answer({"url": f"{address}/me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = lambda path: "lfs" if path.endswith(".safetensors") else "regular"  # noqa: E731
            self.answer(
                {"files": [{"path": f["path"], "uploadMode": mode(f["path"]), "shouldIgnore": False} for f in files]}
            )
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for o in objects:
                o["actions"] = {"upload": {"href": f"{address}/put/{o['oid']}"}}
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            state["commit"] = [json.loads(line) for line in body.splitlines()]
            self.answer({"commitUrl": f"{address}/me/model/commit/1", "commitOid": "1", "hookOutput": ""})
        else:
            self.answer({})

    def do_PUT(self) -> None:
        self.server.state["put"][self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"error": "not there"}, 404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.state = {"put": {}, "refuse": False}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def online(monkeypatch):
    # The client reads these once at import; the upload by chunks of the public hub has no place in a fake.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_test")


def test_push_uploads_every_file_of_a_checked_folder(fake, online, tmp_path):
    server, address = fake
    spec = PRESETS["tiny"]
    folder = save_params(tmp_path / "m", init_params(spec, jax.random.key(0)), spec, texts={"README.md": "card"})
    hub.push(folder, "me/model", endpoint=address)
    assert server.state["created"]["name"] == "model"
    weights = (folder / "model.safetensors").read_bytes()
    assert server.state["put"] == {hashlib.sha256(weights).hexdigest(): weights}
    sent = {entry["value"]["path"]: entry["value"] for entry in server.state["commit"] if entry["key"] == "file"}
    assert base64.b64decode(sent["config.json"]["content"]) == (folder / "config.json").read_bytes()
    assert {"README.md", "generation_config.json", "SHA256SUMS"} <= sent.keys()


def test_export_pushes_what_it_wrote(run_dir, fake, online, tmp_path, monkeypatch, capsys):
    server, address = fake
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    folder, out = run_dir[0], tmp_path / "m"
    assert cli.main(["export", str(folder), str(out), "--push_to", "me/model"]) == 0
    assert f"pushed: {address}/me/model/commit/1" in capsys.readouterr().out
    weights = (out / "model.safetensors").read_bytes()
    assert server.state["put"][hashlib.sha256(weights).hexdigest()] == weights
    server.state["refuse"] = True
    again = ["export", str(folder), str(out), "--overwrite", "--push_to", "me/model"]
    assert cli.main(again) == 2 and f"the folder {out} is whole" in capsys.readouterr().err


def test_refusal_is_one_line_and_damage_is_never_pushed(fake, online, tmp_path):
    server, address = fake
    spec = PRESETS["tiny"]
    folder = save_params(tmp_path / "m", init_params(spec, jax.random.key(0)), spec)
    server.state["refuse"] = True
    with pytest.raises(UserError, match="cannot be pushed") as caught:
        hub.push(folder, "me/model", endpoint=address)
    assert "\n" not in str(caught.value) and "hf_test" not in str(caught.value)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="differs from its checksum"):
        hub.push(folder, "me/model", endpoint=address)
    with pytest.raises(UserError, match="expected owner/name"):
        hub.push(folder, "not a repo", endpoint=address)


def test_download_failure_is_one_line(fake, online):
    _, address = fake
    with pytest.raises(UserError, match="cannot be downloaded"):
        hub.download("me/model", endpoint=address)
