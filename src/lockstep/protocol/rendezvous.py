"""The rendezvous of a run's nodes: a store at HOST:PORT, served by node 0."""

import errno
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import DistNetworkError, DistStoreError

from lockstep.base.errors import LaunchError
from lockstep.protocol.store_client import StoreClient
from lockstep.protocol.store_server import StoreServer

LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""How long to wait before logging it: nodes that are started together are not up at once."""
RESOLVE_SECONDS = 60.0
"""How long to retry a host name that does not resolve, such as that of a pod that has just started."""
STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Parse HOST:PORT; raises LaunchError."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise LaunchError(f"--rendezvous {text}: should be HOST:PORT of the first machine, such as node1:29400")
        return cls(host=host, port=int(port))

    def address(self) -> tuple[socket.AddressFamily, str]:
        """Return address family and numeric address. Raises OSError if the name does not resolve."""
        family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return family, str(address[0])

    def is_local(self) -> bool:
        """Return whether the address belongs to this machine, so that it can be bound."""
        try:
            family, address = self.address()
            with socket.socket(family) as probe:
                probe.bind((address, 0))
        except OSError:
            return False
        return True


def serve_store(endpoint: Endpoint) -> StoreServer:
    """Serve a store, which has to be opened to other processes; port 0 means any free port. Raises LaunchError."""
    try:
        family, address = endpoint.address()
    except OSError as error:
        text = f"{endpoint.host} cannot be resolved ({error.strerror}): use another name of this machine"
        raise LaunchError(text, code="LS-NODE-04") from None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, endpoint.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(_bind_error(endpoint, address, error), code="LS-NODE-04") from None
    check_reachable(Endpoint(host=address, port=listener.getsockname()[1]))
    return StoreServer(listener, STORE_TIMEOUT)


def check_reachable(own: Endpoint) -> None:
    """Raise LaunchError where this machine cannot reach an address of its own."""
    if address_to(own) is None:
        raise LaunchError(
            f"this machine cannot reach its own address {own.host}, at which processes meet: bring its loopback "
            "interface up (`ip link set lo up`)",
            code="LS-NET-03",
        )


def _bind_error(endpoint: Endpoint, address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} of {endpoint.host} is taken: choose another with --rendezvous, on every machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--rendezvous {endpoint}: {address} is not an address of this machine ({socket.gethostname()}), "
            "and --node-rank 0 has to run where it points to"
        )
    return f"--rendezvous {endpoint}: {error.strerror}; choose another port"


def greeted(endpoint: Endpoint, *, seconds: float) -> StoreClient:
    """Connect to the leader's store, with retries until it is up and has greeted. Raises LaunchError."""
    start, logged = time.monotonic(), ""
    while True:
        limit, waited = seconds, time.monotonic() - start
        try:
            patience = max(RETRY_SECONDS, min(5.0, seconds))
            store = StoreClient(endpoint.host, endpoint.port, timeout=STORE_TIMEOUT, connect_seconds=patience)
            store.read_greeting(seconds=max(RETRY_SECONDS, seconds - waited))
            return store
        except socket.gaierror as error:
            limit, reason = min(seconds, RESOLVE_SECONDS), f"{endpoint.host} cannot be resolved ({error.strerror})"
        except OSError as error:
            reason = f"{endpoint} does not answer ({error.strerror or 'timed out'})"
        except DistStoreError:
            reason = f"{endpoint} answers, but no run of Lockstep begins there"
        except DistNetworkError as error:
            reason = f"{endpoint} answers, but not as Lockstep does ({error})"
        waited = time.monotonic() - start
        if waited + RETRY_SECONDS > limit:
            raise LaunchError(
                f"{reason} for {waited:.0f} s: check --rendezvous, the first machine (--node-rank 0) and the firewall "
                "between (launch.join_timeout_seconds)",
                code="LS-NODE-01",
            )
        if reason != logged and (waited > QUIET_SECONDS or limit < seconds):
            sys.stderr.write(f"{reason}; waiting up to {limit:.0f} s for it\n")
            logged = reason
        time.sleep(RETRY_SECONDS)


def address_to(endpoint: Endpoint) -> str | None:
    """Return this machine's own address on the route to the endpoint; None if unknown."""
    try:
        family, address = endpoint.address()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing: it only looks up the route
            probe.connect((address, endpoint.port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def answers(endpoint: Endpoint, *, seconds: float) -> bool:
    """Return whether a process listens there."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=seconds).close()
    except OSError:
        return False
    return True


def interface_to(endpoint: Endpoint) -> str | None:
    """Return this machine's network interface that routes to the endpoint; None if unknown."""
    own = address_to(endpoint)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return name
    return None
