"""Uploads of exports to a stand-in of the Hugging Face hub."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import call, init, load_config, save_run

from smallgpt_jax import models
from smallgpt_jax.run.config import Config

hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import constants, hf_api  # noqa: E402


class Hub:
    """What a stand-in has received, and how it answers."""

    def __init__(self, url: str):
        self.url = url
        self.created: list[dict] = []
        self.commits: list[dict[str, bytes]] = []  # {path: content} of each
        self.status = 200  # of commits

    def answer(self, path: str, body: bytes, authorization: str) -> tuple[int, dict]:
        if authorization != "Bearer hf_test":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/{self.created[-1]['organization']}/model"}
        if path == "/api/validate-yaml":  # of the model card
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return 200, {"files": [{"path": name, **modes} for name in names]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                for line in lines
                if line["key"] == "file"
            }
            if self.status != 200:
                return self.status, {"error": "no space left"}
            self.commits.append(files)
            return 200, {"commitUrl": f"{self.url}/ada/model/commit/0123", "commitOid": "0123"}
        return 404, {"error": f"unexpected {path}"}


@pytest.fixture
def server(monkeypatch) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, content = stand_in.answer(self.path, body, self.headers["Authorization"])
            reply = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("localhost", 0), Handler)
    stand_in = Hub(f"http://localhost:{httpd.server_port}")
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
    monkeypatch.setattr(hf_api.api, "endpoint", stand_in.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield stand_in
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, text_file) -> Path:
    config = load_config("pgpt")
    config.data.source, config.data.tokenizer = str(text_file), "bytes"
    config.model.vocab_size = 257
    model = models.build(**config.model)
    return save_run(tmp_path_factory.mktemp("push") / "run", Config.of(config), init(model))


def push(workdir: Path, output: Path, *arguments: str):
    return call("convert", "--to=hf", f"--workdir={workdir}", f"--output={output}", *arguments)


def test_a_folder_is_uploaded_as_one_commit_to_a_private_repository(server, workdir, tmp_path):
    output = tmp_path / "exported"
    done = push(workdir, output, "--push=ada/model")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(f"uploaded to {server.url}/ada/model/tree/0123")
    (repository,) = server.created
    assert (repository["name"], repository["organization"]) == ("model", "ada")
    assert repository["visibility"] == "private"
    files = {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in output.rglob("*")
        if path.is_file()
    }
    assert server.commits == [files] and "model.safetensors" in files
    assert 'from_pretrained("ada/model", trust_remote_code=True)' in files["README.md"].decode()


def test_a_repository_can_be_public(server, workdir, tmp_path):
    assert push(workdir, tmp_path / "out", "--push=ada/model", "--noprivate").returncode == 0
    assert server.created[0]["visibility"] == "public"


def test_a_failed_upload_leaves_the_export(server, workdir, tmp_path):
    server.status = 403
    output = tmp_path / "exported"
    done = push(workdir, output, "--push=ada/model")
    assert done.returncode == 1 and done.stderr.count("\n") <= 2
    assert "--push=ada/model: the upload failed" in done.stderr
    assert f"hf upload ada/model {output}" in done.stderr
    assert (output / "model.safetensors").exists() and server.commits == []


@pytest.mark.parametrize("name", ["model", "a/b/c", "/b", "a b/c", "https://huggingface.co/a/b"])
def test_wrong_names(name, server, workdir, tmp_path):
    done = push(workdir, tmp_path / "out", f"--push={name}")
    assert done.returncode == 1 and f"--push={name}: expected OWNER/NAME" in done.stderr
    assert not (tmp_path / "out").exists() and server.created == []


def test_a_login_is_needed_before_anything_is_written(server, workdir, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(hub, "get_token", lambda: None)
    done = push(workdir, tmp_path / "out", "--push=ada/model")
    assert done.returncode == 1 and "not logged in" in done.stderr
    assert not (tmp_path / "out").exists()


def test_imports_are_not_pushed(tmp_path):
    done = call(
        "convert", "--from=hf", "--input=x", f"--workdir={tmp_path / 'w'}", "--push=ada/model"
    )
    assert done.returncode == 1 and "--push: uploads exports; use it with --to" in done.stderr
