"""A hub on the loopback address: one commit of each repository, from folders."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


@contextmanager
def served(repositories: dict[str, Path]) -> Iterator[str]:
    """The address of a hub. repositories: models as ORG/NAME, data as datasets/ORG/NAME. One of
    the organisation `gated` asks for consent."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0].removeprefix("/")
            name = path.removeprefix("api/").removeprefix("models/")
            found = next((one for one in repositories if name.startswith(one)), None)
            if found is None or found.startswith("gated"):
                code = "RepoNotFound" if found is None else "GatedRepo"
                return self._send(404 if found is None else 403, b"", body, {"X-Error-Code": code})
            folder, rest = repositories[found], name.removeprefix(found).strip("/")
            files = [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()]
            if path.startswith("api/") and rest.startswith("tree"):
                told = [
                    {"type": "file", "path": one, "oid": "0" * 40,
                     "size": (folder / one).stat().st_size}
                    for one in files
                ]  # fmt: skip
                return self._send(200, json.dumps(told).encode(), body)
            if path.startswith("api/"):
                if "missing" in rest:
                    return self._send(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
                told = {"id": found, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                return self._send(200, json.dumps(told).encode(), body)
            content = (folder / rest.partition(f"resolve/{COMMIT}/")[2]).read_bytes()
            tag = hashlib.sha1(content).hexdigest()
            self._send(200, content, body, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})
            return None

        def _send(self, code: int, content: bytes, body: bool, more: Any = None) -> None:
            self.send_response(code)
            for key, value in ({"Content-Length": len(content)} | (more or {})).items():
                self.send_header(key, str(value))
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
