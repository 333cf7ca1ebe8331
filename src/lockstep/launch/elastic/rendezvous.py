"""Where the machines of a run meet: a TCPStore at HOST:PORT, served by the first of them."""

import errno
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import DistError, TCPStore

from lockstep.base.errors import LaunchError

LOOPBACK = "127.0.0.1"
RETRY_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""Machines that are started together are not up at once: only then is waiting worth a word."""
NAME_SECONDS = 60.0
"""A name that cannot be resolved may still become known: of a pod that was started just now."""
STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> "Endpoint":
        """Of HOST:PORT; raises LaunchError."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise LaunchError(f"--rendezvous {text}: should be HOST:PORT of the first machine, such as node1:29400")
        return cls(host=host, port=int(port))

    def address(self) -> tuple[socket.AddressFamily, str]:
        """Family and numeric address. Raises OSError where the name is not known."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        return found[0][0], str(found[0][4][0])

    def is_here(self) -> bool:
        """Whether the address belongs to this machine: only then can something listen there."""
        try:
            family, address = self.address()
            with socket.socket(family) as trial:
                trial.bind((address, 0))
        except OSError:
            return False
        return True


def served(endpoint: Endpoint) -> TCPStore:
    """A store that is served from here; port 0 means any that is free. Raises LaunchError."""
    try:
        family, address = endpoint.address()
    except OSError as error:
        raise LaunchError(
            f"{endpoint.host} cannot be resolved ({error.strerror}): name this machine otherwise"
        ) from None
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, endpoint.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(_why_not(endpoint, address, error)) from None
    port = listener.getsockname()[1]
    return TCPStore(
        endpoint.host,
        port,
        is_master=True,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # bound to this one address, where torch would listen on all
    )


def _why_not(endpoint: Endpoint, address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {endpoint.port} of {endpoint.host} is taken: choose another with --rendezvous, on every machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"--rendezvous {endpoint}: {address} is not an address of this machine ({socket.gethostname()}), "
            "and --node-rank 0 has to run where it points to"
        )
    return f"--rendezvous {endpoint}: {error.strerror}; choose another port"


def connected(endpoint: Endpoint, *, seconds: float) -> TCPStore:
    """The store that another machine serves, as soon as it does. Raises LaunchError."""
    start, said = time.monotonic(), ""
    while True:
        limit = seconds
        try:
            family, address = endpoint.address()
            with socket.socket(family) as trial:
                trial.settimeout(max(RETRY_SECONDS, min(5.0, seconds)))
                trial.connect((address, endpoint.port))
            return TCPStore(endpoint.host, endpoint.port, timeout=STORE_TIMEOUT)
        except socket.gaierror as error:
            limit, why = min(seconds, NAME_SECONDS), f"{endpoint.host} cannot be resolved ({error.strerror})"
        except OSError as error:
            why = f"{endpoint} does not answer ({error.strerror or 'timed out'})"
        except DistError as error:
            why = f"{endpoint} answers, but not as Lockstep does ({str(error).splitlines()[0]})"
        waited = time.monotonic() - start
        if waited + RETRY_SECONDS > limit:
            raise LaunchError(
                f"{why} for {waited:.0f} s: check --rendezvous, the first machine (--node-rank 0) and the firewall "
                "between (launch.join_timeout_seconds)"
            )
        if why != said and (waited > QUIET_SECONDS or limit < seconds):
            sys.stderr.write(f"{why}; waiting up to {limit:.0f} s for it\n")
            said = why
        time.sleep(RETRY_SECONDS)


def interface_to(endpoint: Endpoint) -> str | None:
    """The network interface of this machine that leads to the endpoint; None where it cannot be told."""
    try:
        family, address = endpoint.address()
        with socket.socket(family, socket.SOCK_DGRAM) as trial:  # nothing is sent: it only asks for the route
            trial.connect((address, endpoint.port))
            own = trial.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.split("%")[0] == own for found in addresses):
            return name
    return None
