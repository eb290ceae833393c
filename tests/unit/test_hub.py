"""Models of the Hugging Face Hub: from a cache, from a double of the Hub, and what is said where neither has them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from helix.hub import is_hub_id, local_directory, missing_files
from tests.e2e.checkpoints import checkpoint

COMMIT = "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
OTHERS = {
    "pytorch_model.bin": b"a program, maybe",
    "README.md": b"# words",
    "consolidated.pth": b"more",
    "consolidated-00001-of-00001.safetensors": b"the same weights",
    "original/model.safetensors": b"the same weights",
}


class Hub:
    """A double of the Hub that serves one repository, `org/tiny`, in the few forms that `huggingface_hub` asks for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *of: object) -> None:
                pass

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                hub.asked.append((path, self.headers.get("Authorization")))
                code, data, headers = hub.answer(path)
                self.send_response(code)
                for name, value in (headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data if self.command == "GET" else b"")

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """A status, content and headers."""
        sha1 = {name: hashlib.sha1(data).hexdigest() for name, data in self.files.items()}
        parts = path.strip("/").split("/")
        if path.startswith("/api/models/org/gated"):
            return 403, b"{}", {"X-Error-Code": "GatedRepo"}
        if path.startswith("/api/models/org/tiny"):
            if "revision" in parts and parts[-1] not in ("main", "v1", COMMIT):
                return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
            tree = [{"type": "file", "path": n, "size": len(d), "oid": sha1[n]} for n, d in self.files.items()]
            about = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            return 200, json.dumps(tree if "tree" in parts else about).encode(), {}
        if path.startswith("/org/tiny/resolve/") and (name := "/".join(parts[4:])) in self.files:
            return 200, self.files[name], {"ETag": f'"{sha1[name]}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    directory = checkpoint("qwen3")
    made = Hub({path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()} | OTHERS)
    yield made
    made.server.shutdown()


def resolved(hub: str, home: Path, name: str, weights: bool = True, offline: bool = False) -> tuple[Path | None, str]:
    """Looks a name up as in a process that was started with HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE."""
    address = hub + "/{repo_id}/resolve/{revision}/{filename}"
    process_environment = {"ENDPOINT": hub, "HUGGINGFACE_CO_URL_TEMPLATE": address, "HF_HUB_OFFLINE": offline}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "mine")
        patch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between attempts
        for constant, value in (process_environment | {"HF_HUB_CACHE": str(home / "hub")}).items():
            patch.setattr(constants, constant, value)
        try:
            return local_directory(name, weights), ""
        except ValueError as error:
            return None, str(error)


def test_ids_and_directories_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("Qwen/Qwen3-8B") and is_hub_id("org/name@refs/pr/3") and not is_hub_id("llama")
    assert not any(map(is_hub_id, ("/a/b", "./b", "a/b/c", "a b/c", "../b", "a/.b")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name") and local_directory("org/name") == Path("org/name")


def test_it_is_downloaded_once_and_safetensors_alone(hub: Hub, tmp_path: Path) -> None:
    path, _ = resolved(hub.url, tmp_path, "org/tiny@v1")
    assert path is not None and missing_files(path) == [] and path.name == COMMIT
    wanted = {name for name in hub.files.keys() - OTHERS.keys() if name.endswith((".safetensors", ".json"))}
    assert {file.name for file in path.iterdir()} == wanted and "model.safetensors" in wanted
    assert all((path / name).read_bytes() == hub.files[name] for name in wanted)
    assert "Bearer mine" in {key for _, key in hub.asked}
    count = len(hub.asked)
    again, _ = resolved(hub.url, tmp_path, "org/tiny@v1")
    offline, _ = resolved("http://127.0.0.1:9", tmp_path, "org/tiny@v1", offline=True)
    assert again == offline == path and len(hub.asked) == count, "what is there is not asked for"


def test_a_shape_needs_no_weights(hub: Hub, tmp_path: Path) -> None:
    path, _ = resolved(hub.url, tmp_path, "org/tiny", weights=False)
    assert path is not None and not [*path.glob("*.safetensors")] and (path / "config.json").exists()
    whole, _ = resolved(hub.url, tmp_path, "org/tiny")
    assert whole is not None and missing_files(whole) == []


def test_what_cannot_be_had_is_said_in_a_line(hub: Hub, tmp_path: Path) -> None:
    none = "http://127.0.0.1:9"  # nobody listens there
    for at, name, offline, error in (
        (none, "org/tiny", True, "hub lacks config.json of org/tiny, and HF_HUB_OFFLINE=1 forbids"),
        (none, "org/tiny", False, "hub lacks config.json of org/tiny, and http://127.0.0.1:9 cannot be reached"),
        (hub.url, "org/nothing", False, "org/nothing is neither a local directory nor a model at"),
        (hub.url, "org/tiny@v9", False, "org/tiny has no revision v9"),
        (hub.url, "org/gated", False, "org/gated is gated: accept its terms at"),
    ):
        path, line = resolved(at, tmp_path, name, offline=offline)
        assert path is None and error in line, line
    hub.files = {name: data for name, data in hub.files.items() if not name.endswith("safetensors")}
    path, line = resolved(hub.url, tmp_path, "org/tiny")
    assert path is None and "has no model" in line and "only safetensors are supported" in line, line


def test_a_cache_of_single_files_is_completed_or_refused(hub: Hub, tmp_path: Path) -> None:
    """`hf download org/tiny config.json model.safetensors` leaves no word on what else there is."""
    cache = tmp_path / "hub" / "models--org--tiny"
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(hub.files[name])
    none = "http://127.0.0.1:9"  # nobody listens there
    lacks = "lacks tokenizer.json, tokenizer_config.json, generation_config.json and 1 more files of org/tiny"
    path, line = resolved(none, tmp_path, "org/tiny", offline=True)
    assert path is None and lacks in line and f"or set model.path={snapshot} to run it without" in line, line
    path, line = resolved(none, tmp_path, "org/tiny")
    assert path is None and lacks in line and "cannot be reached" in line, line
    path, line = resolved(none, tmp_path, "org/tiny", weights=False, offline=True)
    assert path == snapshot, "the shape alone needs none of them"

    absent = cache / ".no_exist" / COMMIT  # where libraries note what a repository has not
    absent.mkdir(parents=True)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (absent / name).touch()
    path, line = resolved(none, tmp_path, "org/tiny", offline=True)
    assert path is None and "lacks tokenizer_config.json of org/tiny" in line, line
    (absent / "tokenizer_config.json").touch()
    assert resolved(none, tmp_path, "org/tiny", offline=True)[0] == snapshot
    shutil.rmtree(absent)

    hub.files |= {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"chat_template": ""}'}
    path, line = resolved(hub.url, tmp_path, "org/tiny")
    assert path == snapshot and (snapshot / "tokenizer.json").read_bytes() == b"{}", line
    assert (snapshot / "generation_config.json").exists()
    count = len(hub.asked)
    assert resolved(hub.url, tmp_path, "org/tiny")[0] == snapshot and len(hub.asked) == count
    assert resolved(none, tmp_path, "org/tiny", offline=True)[0] == snapshot, (
        "it has no chat_template.jinja, as is known"
    )
    (snapshot / "tokenizer.json").unlink()
    path, line = resolved(none, tmp_path, "org/tiny", offline=True)
    assert path is None and "lacks tokenizer.json of org/tiny" in line, line
