"""A real S3 server (moto's) on this machine, with what can go wrong planted between it and its clients."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import pytest

BUCKET = "bucket"
KEY, SECRET = "AKIAOFATEST000000000", "sEcReT/of+a+test00000000000000000000000000"
_UNAVAILABLE = b"<?xml version='1.0'?><Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>"

Fault = Callable[
    [str, str], str | None
]  # of a request's method and key: None, "503", "kill before" or "kill after"


@dataclass
class S3Server:
    """``requests`` are (method, key, bytes of the answer); ``fault`` plants what happens to one.

    ``child`` is the process that it kills.
    """

    url: str
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    fault: Fault = lambda method, key: None
    slow: float = 0.0  # seconds of every answer
    child: int | None = None

    def names(self) -> list[str]:
        from specgen.config.urls import Url
        from specgen.storage import Store

        return Store.at(Url(f"s3://{BUCKET}")).names()


def _kill(server: S3Server) -> None:
    import signal

    if server.child is not None:
        os.kill(server.child, signal.SIGKILL)
        server.child = None


def _between(server: S3Server, app: Any) -> Any:
    def answered(environ: dict[str, Any], start_response: Any) -> Any:
        method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}").strip("/")
        if "delete" in environ.get("QUERY_STRING", ""):
            method = "DELETE"
        time.sleep(server.slow)
        fault = server.fault(method, key)
        if fault == "503":
            start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [_UNAVAILABLE]
        if fault == "kill before":
            _kill(server)
        found = b"".join(app(environ, start_response))
        server.requests.append((method, key, len(found)))
        if fault == "kill after":
            _kill(server)
        return [found]

    return answered


@contextmanager
def s3_server(patch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """One with an empty bucket; the environment has its address and the credentials for it."""
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server(url="")
    app = _between(server, DomainDispatcherApplication(create_backend_app))
    listening = make_server("127.0.0.1", 0, app, threaded=True)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    patch.setenv("AWS_ENDPOINT_URL", server.url)
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    urlopen(Request(f"{server.url}/moto-api/reset", method="POST")).close()  # of earlier tests
    s3fs.S3FileSystem().mkdir(BUCKET)
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        s3fs.S3FileSystem.clear_instance_cache()
