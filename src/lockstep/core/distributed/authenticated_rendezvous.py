"""The rendezvous of a run's processes: a store that asks for their secret, whichever program has started them."""

import hmac
import os
import secrets
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.base.world import World
from lockstep.core.distributed.authenticated_group import wait_for_all
from lockstep.protocol import run_secret
from lockstep.protocol.environment import RUN_ID
from lockstep.protocol.rendezvous import Endpoint, address_to, serve_store
from lockstep.protocol.store_client import connected


def meet(world: World, secret: bytes | None, timeout: timedelta) -> dist.Store:
    """Return the store of Lockstep's launcher; under torchrun, that of rank 0 or, without a secret, torch's own.
    Collective. Raises LaunchError where the processes do not share one secret."""
    if secret is not None and os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID:
        return connected(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), secret, timeout=timeout)
    torchs, *_ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    check_secrets(torchs, world, secret, timeout=timeout)
    if secret is None:
        return torchs
    return _store_of_main_rank(dist.PrefixStore("meeting", torchs), world, secret, timeout=timeout)


def check_secrets(store: dist.Store, world: World, secret: bytes | None, *, timeout: timedelta) -> None:
    """Check that all ranks have the same secret, or none. Collective. Raises LaunchError on all ranks where not."""
    store.set(f"secret-{world.rank}", "none" if secret is None else hmac.digest(secret, b"which", "sha256").hex())
    keys = [f"secret-{rank}" for rank in range(world.size)]
    wait_for_all(store, keys, timeout)
    if len(set(map(bytes, store.multi_get(keys)))) > 1:
        store.set(f"told-{world.rank}", "")
        if world.is_main:  # it holds the store, which the others have to read before it ends
            with suppress(PeerLost):
                wait_for_all(store, [f"told-{rank}" for rank in range(world.size)], timeout)
        what = "the processes of this run have different secrets"
        raise LaunchError(f"{what}: set {run_secret.VARIABLE} to one folder, on all machines (docs/launching.md)")


def _store_of_main_rank(torchs: dist.Store, world: World, secret: bytes, *, timeout: timedelta) -> dist.Store:
    """Return a store of rank 0, whose address torch's store holds. Anybody can write to that one, so the address comes
    with a code for a number that each rank has chosen."""
    if world.is_main:
        master = Endpoint(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
        host = master.host if master.is_local() else address_to(master) or master.host
        server = serve_store(Endpoint(host=host, port=0)).open_to(secret)
        for rank in range(1, world.size):
            wait_for_all(torchs, [f"number-{rank}"], timeout)
            code = _code(secret, torchs.get(f"number-{rank}"), f"{rank} {host}:{server.port}")
            torchs.set(f"place-{rank}", f"{host}:{server.port} {code}")
        return connected(host, server.port, secret, timeout=timeout)
    number = secrets.token_hex(16)
    torchs.set(f"number-{world.rank}", number)
    wait_for_all(torchs, [f"place-{world.rank}"], timeout)
    place, _, code = torchs.get(f"place-{world.rank}").decode(errors="replace").rpartition(" ")
    if not hmac.compare_digest(code.encode(), _code(secret, number.encode(), f"{world.rank} {place}").encode()):
        raise LaunchError("another program has written where the processes meet: start the run again")
    host, _, port = place.rpartition(":")
    return connected(host, int(port), secret, timeout=timeout)


def _code(secret: bytes, number: bytes, place: str) -> str:
    return hmac.digest(secret, b"place %b %b" % (number, place.encode()), "sha256").hex()
