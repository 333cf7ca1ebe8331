"""A stand-in of the Hugging Face hub: its HTTP API for repositories, uploads (git and LFS) and downloads, on loopback.

It keeps everything in memory. The real client is pointed to it by HF_ENDPOINT.
"""

import asyncio
import base64
import hashlib
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

LARGE = ("*.safetensors", "*.pt", "*.pt2", "*.bin", "*.onnx")
KINDS = {"models": "", "spaces": "spaces/"}
"""In the paths of the API -> in those of repositories."""
INITIAL = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass
class Commit:
    message: str
    files: dict
    """Path -> contents."""

    @property
    def oid(self):
        state = [self.message, sorted((path, hashlib.sha256(data).hexdigest()) for path, data in self.files.items())]
        return hashlib.sha1(json.dumps(state).encode()).hexdigest()


@dataclass
class Repository:
    is_private: bool
    settings: dict
    """What it was created with."""
    commits: list = field(default_factory=lambda: [Commit("initial commit", {".gitattributes": INITIAL})])

    @property
    def files(self):
        return self.commits[-1].files


def is_large(path):
    return any(fnmatch(path, pattern) for pattern in LARGE)


def oid_of(path, data):
    """As git or LFS names the contents."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Refused(Exception):
    def __init__(self, status, message, code=""):
        self.response = JSONResponse(
            {"error": message}, status, {"x-error-message": message} | ({"x-error-code": code} if code else {})
        )


class Hub:
    """Users by token, repositories by "models/OWNER/NAME" or "spaces/OWNER/NAME", and LFS objects by sha256."""

    def __init__(self, tokens):
        self.tokens, self.repositories, self.objects, self.url = tokens, {}, {}, ""
        self.uploads = 0
        """Of LFS objects, that have arrived."""
        self.holds = False
        """Whether an upload stands still once its first bytes have come."""
        self.held = threading.Event()
        """Whether one does."""

    # ---- who asks, and for what

    def user(self, request, *, writes):
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        name, role = self.tokens[token]
        if writes and role != "write":
            raise Refused(403, "You don't have the rights to create a model under this namespace")
        return name

    def repository(self, request, *, writes=False):
        kind = request.path_params.get("kind", "models")
        owner, name = request.path_params["owner"], request.path_params["name"]
        found = self.repositories.get(f"{kind}/{owner}/{name}")
        if writes and self.user(request, writes=True) != owner:
            raise Refused(403, f"You don't have the rights to write to {owner}/{name}")
        if found is None or (found.is_private and self.user(request, writes=False) != owner):
            raise Refused(404, "Repository not found", "RepoNotFound")
        return found

    # ---- routes

    async def create(self, request):
        asked = await request.json()
        user = self.user(request, writes=True)
        owner = asked.get("organization") or user
        if owner != user:
            raise Refused(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        kind = f"{asked.get('type') or 'model'}s"
        key, url = f"{kind}/{owner}/{asked['name']}", f"{self.url}/{KINDS[kind]}{owner}/{asked['name']}"
        if key in self.repositories:
            return JSONResponse({"error": "You already created this repo", "url": url}, 409)
        self.repositories[key] = Repository(asked.get("visibility") == "private", asked)
        return JSONResponse({"url": url})

    async def validate(self, request):
        asked = await request.json()
        is_valid = asked["content"].startswith("---\n")
        errors = [] if is_valid else [{"message": "README.md has no metadata"}]
        return JSONResponse({"errors": errors, "warnings": []}, 200 if is_valid else 400)

    async def preupload(self, request):
        repository = self.repository(request, writes=True)
        files = [
            {
                "path": (path := each["path"]),
                "uploadMode": "lfs" if is_large(path) else "regular",
                "shouldIgnore": False,
                "oid": oid_of(path, repository.files[path]) if path in repository.files else None,
            }
            for each in (await request.json())["files"]
        ]
        return JSONResponse({"files": files})

    async def batch(self, request):
        self.repository(request, writes=True)
        asked = await request.json()
        assert asked["operation"] == "upload" and "basic" in asked["transfers"]
        objects = []
        for each in asked["objects"]:
            upload, verify = ({"href": f"{self.url}/lfs/{each['oid']}{end}"} for end in ("", "/verify"))
            more = {} if each["oid"] in self.objects else {"actions": {"upload": upload, "verify": verify}}
            objects.append({**each, **more})
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def upload(self, request):
        body = b""
        async for chunk in request.stream():
            body += chunk
            if self.holds:
                self.held.set()
                while not await request.is_disconnected():
                    await asyncio.sleep(0.01)
                return Response(status_code=499)
        if hashlib.sha256(body).hexdigest() != request.path_params["oid"]:
            raise Refused(400, "the sha256 differs")
        self.objects[request.path_params["oid"]] = body
        self.uploads += 1
        return Response()

    async def verify(self, request):
        found = self.objects.get(request.path_params["oid"])
        return Response(status_code=200 if found is not None else 404)

    async def commit(self, request):
        """All of it, or nothing."""
        repository = self.repository(request, writes=True)
        lines = [json.loads(line) for line in (await request.body()).splitlines()]
        files, header = dict(repository.files), lines[0]
        assert header["key"] == "header"
        for line in lines[1:]:
            key, value = line["key"], line["value"]
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in self.objects:
                    raise Refused(400, f"{value['path']} has not been uploaded")
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert key == "deletedFile", key
                del files[value["path"]]
        made = Commit(header["value"]["summary"], files)
        repository.commits.append(made)
        url = f"{self.url}{request.url.path.removeprefix('/api').replace('/commit/main', '')}/commit/{made.oid}"
        return JSONResponse({"success": True, "commitUrl": url, "commitOid": made.oid, "pullRequestUrl": None})

    async def info(self, request):
        repository = self.repository(request)
        name = f"{request.path_params['owner']}/{request.path_params['name']}"
        siblings = [{"rfilename": path} for path in repository.files]
        return JSONResponse(
            {"id": name, "sha": repository.commits[-1].oid, "private": repository.is_private, "siblings": siblings}
        )

    async def tree(self, request):
        found = [
            {"type": "file", "path": path, "size": len(data), "oid": oid_of(path, data)}
            for path, data in self.repository(request).files.items()
        ]
        return JSONResponse(found)

    async def resolve(self, request):
        repository, path = self.repository(request), request.path_params["path"]
        if path not in repository.files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        data = repository.files[path]
        headers = {"x-repo-commit": repository.commits[-1].oid, "etag": f'"{oid_of(path, data)}"'}
        return Response(data, headers=headers, media_type="application/octet-stream")

    def application(self):
        one, of_api = "/{owner}/{name}", "/api/{kind}/{owner}/{name}"
        routes = [
            Route("/", lambda _: Response(), methods=["HEAD", "GET"]),
            Route("/api/repos/create", self.create, methods=["POST"]),
            Route("/api/validate-yaml", self.validate, methods=["POST"]),
            Route(of_api, self.info),
            Route(f"{of_api}/revision/{{revision}}", self.info),
            Route(f"{of_api}/preupload/{{revision}}", self.preupload, methods=["POST"]),
            Route(f"{of_api}/commit/{{revision}}", self.commit, methods=["POST"]),
            Route(f"{of_api}/tree/{{revision}}", self.tree),
            Route("/lfs/{oid}", self.upload, methods=["PUT"]),
            Route("/lfs/{oid}/verify", self.verify, methods=["POST"]),
        ]
        for prefix in ("", "/{kind}"):
            routes += [
                Route(f"{prefix}{one}.git/info/lfs/objects/batch", self.batch, methods=["POST"]),
                Route(f"{prefix}{one}/resolve/{{revision}}/{{path:path}}", self.resolve, methods=["GET", "HEAD"]),
            ]

        async def refused(_, error):
            return error.response

        return Starlette(routes=routes, exception_handlers={Refused: refused})


@contextmanager
def hub_of(tokens):
    """A running hub on a port of its own; `tokens` are token -> (user, "write" or "read")."""
    hub = Hub(tokens)
    settings = uvicorn.Config(
        hub.application(), host="127.0.0.1", port=0, log_level="warning", lifespan="off", ws="none"
    )
    server = uvicorn.Server(settings)
    socket = settings.bind_socket()
    hub.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        socket.close()
