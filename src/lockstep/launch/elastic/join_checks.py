"""Checks before a node joins a run: the same versions of Lockstep and torch, and the same run folder, on all nodes."""

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
from lockstep.protocol import run_secret
from lockstep.protocol.rendezvous import STORE_TIMEOUT, Endpoint
from lockstep.protocol.store_client import StoreClient, connected
from lockstep.protocol.store_server import StoreServer

POLL_SECONDS = 0.25
NFS_CACHE_SECONDS = 60.0
"""How long a file from another machine may take to be visible: NFS caches directory listings for up to a minute."""
NONCE_PREFIX = ".meeting-"
"""File in the run's folder while the leader runs, by which the others check that they see the same folder."""


class Rejection(LaunchError):
    """Error of a node that cannot join until the user changes something there."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that have to be the same on all nodes."""
    return {"Lockstep": version("lockstep-train"), "torch": str(torch.__version__)}


def introduce(store: StoreServer, folder: Path) -> Path:
    """Open the leader's store to other nodes -> the file by which they recognise the run's folder."""
    nonce = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{NONCE_PREFIX}*"):
        stale.unlink(missing_ok=True)
    file = folder / f"{NONCE_PREFIX}{nonce}"
    file.touch()
    greeting = {**versions(), "run": folder.name, "host": platform.node(), "nonce": nonce}
    store.open_to(run_secret.create(folder), greeting)
    return file


def check_versions(store: StoreClient) -> None:
    """Raise Rejection for another version of Lockstep or torch than the leader's, LaunchError for a wrong greeting."""
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
    """Return the leader's store, once this node has proved that it knows the run's secret. Raises Rejection where the
    leader's files do not appear in the folder in time, LaunchError where the secret cannot be read."""
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
