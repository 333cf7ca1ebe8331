"""What has to be the same on all nodes of a run, checked before one joins: versions, and the folder that they share."""

import json
import os
import platform
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed import DistError, TCPStore

from lockstep.base.errors import LaunchError
from lockstep.launch.elastic.rendezvous import Endpoint

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


def introduce(store: TCPStore, folder: Path, *, is_alone: bool) -> Path | None:
    """On the leader: let nodes that join check what has to be the same -> the file that they look for, if any."""
    nonce, file = secrets.token_hex(8), None
    if not is_alone:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{NONCE_PREFIX}*"):
            stale.unlink(missing_ok=True)
        file = folder / f"{NONCE_PREFIX}{nonce}"
        file.touch()
    info = {**versions(), "run": folder.name, "host": platform.node(), "nonce": nonce}
    store.set("leader", json.dumps(info))
    return file


def leader_info(store: TCPStore, endpoint: Endpoint, seconds: float) -> dict[str, str]:
    """What the leader has said of itself, waiting for it so long. Raises LaunchError."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(DistError):
            info: dict[str, str] = json.loads(store.get("leader"))
            return info
        if time.monotonic() > deadline:
            text = f"{endpoint} answers, but no run of Lockstep begins there: check --rendezvous"
            raise LaunchError(text, code="LS-NODE-01")


def check_versions(store: TCPStore, leader: Mapping[str, str]) -> None:
    """Raises Rejection for another version of Lockstep or torch."""
    for package, here in versions().items():
        if leader[package] != here:
            raise _rejection(
                store,
                f"{platform.node()} has {package} {here}, but {leader['host']} (node 0) has {leader[package]}: "
                "install the same on all machines",
                code="LS-NODE-02",
            )


def check_shared(store: TCPStore, leader: Mapping[str, str], folder: Path, *, seconds: float) -> None:
    """Raises Rejection where this is not the leader's folder; its files may take so long to be visible."""
    deadline = time.monotonic() + min(NFS_CACHE_SECONDS, seconds)
    while time.monotonic() < deadline:
        with suppress(OSError):
            if f"{NONCE_PREFIX}{leader['nonce']}" in os.listdir(folder):  # makes NFS revalidate its cache
                return
        time.sleep(POLL_SECONDS)
    raise _rejection(
        store,
        f"{folder} is not the same folder on {platform.node()} and on {leader['host']} (node 0): set run.dir to a "
        "folder that all machines share",
        code="LS-NODE-03",
    )


def _rejection(store: TCPStore, text: str, *, code: str) -> Rejection:
    store.set("rejection", json.dumps({"text": text, "code": code}))
    return Rejection(text, code=code)


def rejection(store: TCPStore) -> Rejection | None:
    """On the leader: why a node cannot join, if one reported so."""
    if not store.check(["rejection"]):
        return None
    reported = json.loads(store.get("rejection"))
    return Rejection(reported["text"], code=reported["code"])
