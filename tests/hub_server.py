"""A hub on this machine: serves directories as repositories, in the protocol that huggingface_hub speaks."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The server's address, the repositories it has, and what it was asked for.

    `cut` names files whose first download breaks off half way, `missing` those that are listed, and whose beginning
    can be had, but not the whole. `gated` are repositories nobody may read. `listings` are answers as they are.
    """

    address: str = ""
    repos: dict[str, Path] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    listings: dict[str, bytes] = field(default_factory=dict)
    ranges: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


def _described(root: Path, path: Path) -> dict[str, object]:
    size, sha256 = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    lfs = {"lfs": {"size": size, "sha256": sha256, "pointerSize": 130}} if path.suffix == ".gguf" else {}
    return {"rfilename": path.relative_to(root).as_posix(), "size": size, **lfs}


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that runs until the block ends."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            if path.startswith("api/models/"):
                self._info(path.removeprefix("api/models/").split("/revision/")[0])
                return
            repo, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            if self._refused(repo):
                return
            file = state.repos[repo] / name
            if name in state.missing and body and not self.headers.get("Range"):
                self._error(404, "EntryNotFound")
                return
            if revision not in (COMMIT, "main") or not file.is_file():
                self._error(404, "EntryNotFound")
                return
            self._file(file, name, body)

        def _refused(self, repo: str) -> bool:
            if repo in state.gated:
                self._error(403, "GatedRepo")
            elif repo not in state.repos:
                self._error(404, "RepoNotFound")
            else:
                return False
            return True

        def _error(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _info(self, repo: str) -> None:
            if repo in state.listings:
                self._json(state.listings[repo])
                return
            if self._refused(repo):
                return
            root = state.repos[repo]
            files = sorted(path for path in root.rglob("*") if path.is_file())
            siblings = [_described(root, path) for path in files]
            document = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            self._json(json.dumps(document | {"private": False, "downloads": 0, "likes": 0}).encode())

        def _json(self, raw: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def _file(self, file: Path, name: str, body: bool) -> None:
            raw = file.read_bytes()
            start, end = 0, len(raw)
            wanted = self.headers.get("Range")
            if body and wanted:
                state.ranges.append((name, wanted))
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last) + 1 if last else len(raw)
            self.send_response(206 if wanted and body else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(raw).hexdigest()}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - start))
            if wanted and body:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(raw)}")
            self.end_headers()
            if not body:
                return
            part = raw[start:end]
            if name in state.cut:
                state.cut.remove(name)
                part = part[: len(part) // 2]
                self.close_connection = True
            state.sent[name] = state.sent.get(name, 0) + len(part)
            self.wfile.write(part)
            if self.close_connection:
                self.wfile.flush()
                self.connection.shutdown(2)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
