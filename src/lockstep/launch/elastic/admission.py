"""What has to be the same on all nodes of a run, checked before one joins: versions, and the folder that they share."""

import os
import platform
import secrets
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed import DistError

from lockstep.base.errors import LaunchError
from lockstep.launch.elastic import run_secret
from lockstep.launch.elastic.rendezvous import STORE_TIMEOUT, Endpoint
from lockstep.launch.elastic.store_client import StoreClient, connected
from lockstep.launch.elastic.store_server import StoreServer

POLL_SECONDS = 0.25
NFS_CACHE_SECONDS = 60.0
"""How long a file from another machine may take to be visible: NFS caches directory listings for up to a minute."""
NONCE_PREFIX = ".meeting-"
"""A file in the run's folder, from the start of the leader to its end, by which the others check that they see the same
folder."""


class Rejection(LaunchError):
    """This node cannot join, as long as somebody does not change something there."""


def versions() -> dict[str, str]:
    """What has to be the same on all nodes."""
    return {"Lockstep": version("lockstep-train"), "torch": str(torch.__version__)}


def introduce(store: StoreServer, folder: Path, *, is_alone: bool) -> Path | None:
    """On the leader: admit nodes, which first check what has to be the same -> the file that they look for, if any."""
    nonce, file = secrets.token_hex(8), None
    if not is_alone:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{NONCE_PREFIX}*"):
            stale.unlink(missing_ok=True)
        file = folder / f"{NONCE_PREFIX}{nonce}"
        file.touch()
        greeting = {**versions(), "run": folder.name, "host": platform.node(), "nonce": nonce}
        store.open_to(run_secret.create(folder), greeting)
    return file


def check_versions(store: StoreClient) -> None:
    """Raises Rejection for another version of Lockstep or torch than the leader's, LaunchError for a wrong greeting."""
    leader = store.greeting
    for package, here in versions().items():
        if leader.get(package) != here:
            raise _rejection(
                store,
                f"{platform.node()} has {package} {here}, but {leader.get('host')} (node 0) has {leader.get(package)}: "
                "install the same on all machines",
                code="LS-NODE-02",
            )
    if Path(name := leader.get("run", "")).name != name or not name:
        raise LaunchError(f"{store.host}:{store.port} names a run {name!r}, which is no name", code="LS-NODE-01")


def join(store: StoreClient, folder: Path, *, seconds: float) -> StoreClient:
    """The leader's store, for a node that knows the run's secret. Raises Rejection where this is not the leader's
    folder, whose files may take so long to be visible; LaunchError where the secret cannot be read."""
    deadline, leader = time.monotonic() + min(NFS_CACHE_SECONDS, seconds), store.greeting
    needed = {f"{NONCE_PREFIX}{leader['nonce']}", run_secret.FILE}
    while time.monotonic() < deadline:
        with suppress(OSError):
            if needed.issubset(os.listdir(folder)):  # makes NFS revalidate its cache
                break
        time.sleep(POLL_SECONDS)
    else:
        raise _rejection(
            store,
            f"{folder} is not the same folder on {platform.node()} and on {leader['host']} (node 0): set run.dir to a "
            "folder that all machines share",
            code="LS-NODE-03",
        )
    return _admitted(store, folder)


def _admitted(store: StoreClient, folder: Path) -> StoreClient:
    try:
        return connected(store.host, store.port, run_secret.read(folder), timeout=STORE_TIMEOUT)
    except OSError as error:
        text = f"{folder / run_secret.FILE} cannot be read ({error}): start all machines of a run as the same user"
        raise LaunchError(text, code="LS-NODE-03") from None
    except DistError as error:
        endpoint = Endpoint(host=store.host, port=store.port)
        raise LaunchError(f"{endpoint} does not admit this machine ({error})", code="LS-NODE-01") from None
    finally:
        store.close()


def _rejection(store: StoreClient, text: str, *, code: str) -> Rejection:
    with suppress(DistError, OSError):
        again = StoreClient(store.host, store.port, timeout=STORE_TIMEOUT)  # the first one has waited for too long
        again.read_greeting()
        again.reject(text=text, code=code)
    return Rejection(text, code=code)


def rejection(store: StoreServer) -> Rejection | None:
    """On the leader: why a node cannot join, if one reported so."""
    told = store.rejection
    return Rejection(told["text"], code=told["code"]) if told else None
