"""An object store on loopback: moto's server of S3's API, which keeps everything in memory.

A test can make it hold an upload until the client is killed, and count what is asked of it.
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import boto3
import requests
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class Quiet(WSGIRequestHandler):
    def log(self, *_):
        pass


@dataclass
class ObjectStore:
    url: str = ""
    holds: str | None = None
    """Uploads of keys that end with this wait, until it is None."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set once an upload waits."""
    requests: list = field(default_factory=list)
    """(method, path) of each."""
    refuses: bool = False
    """Whether every request is answered with 403."""

    @property
    def variables(self):
        """Of a process that uses it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.url, "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}

    @property
    def client(self):
        names = {"aws_access_key_id": "ada", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **names)

    def put(self, name, contents):
        self.client.put_object(Bucket=BUCKET, Key=name, Body=contents)

    def put_folder(self, name, folder):
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def get(self, name):
        return self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def names(self, prefix=""):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def downloads(self):
        """Keys whose contents were asked for."""
        prefix = f"/{BUCKET}/"
        return [path.removeprefix(prefix) for method, path in self.requests if method == "GET" and path.count("/") > 2]

    def _answer(self, application, environ, start):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if self.refuses:
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        if method in ("PUT", "POST") and self.holds is not None and path.endswith(self.holds):
            self.held.set()
            while self.holds is not None:
                threading.Event().wait(0.05)
            start("503 Slow Down", [])
            return [b""]
        return application(environ, start)


@contextmanager
def object_store(monkeypatch):
    """A store with an empty bucket, which the variables of this process point to."""
    store, application = ObjectStore(), DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", 0, lambda *request: store._answer(application, *request), threaded=True, request_handler=Quiet
    )
    store.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        for name, value in store.variables.items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        requests.post(f"{store.url}/moto-api/reset", timeout=10)
        S3FileSystem.clear_instance_cache()
        store.client.create_bucket(Bucket=BUCKET)
        yield store
    finally:
        store.holds = None
        server.shutdown()
        server.server_close()
        thread.join()
