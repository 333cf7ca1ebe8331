"""The network between processes and machines."""

import socket
from collections.abc import Iterator

import psutil

from lockstep.tools.doctor.doctor_context import Diagnosis, DoctorContext

SCOPE = "machine"


def check(context: DoctorContext) -> Iterator[Diagnosis]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        yield Diagnosis(
            code="LS-NET-01",
            severity="warning" if context.launch.max_nodes == 1 else "error",
            cause=f"the name of this machine, {name}, has no address: other machines, and Gloo, look it up",
            repair=f"add it to /etc/hosts (127.0.0.1 {name}), or set launch.interface",
        )
    states = psutil.net_if_stats()
    for interface in filter(None, (context.launch.interface or "").split(",")):
        if interface not in states or not states[interface].isup:
            known = ", ".join(sorted(each for each, state in states.items() if state.isup))
            yield Diagnosis.error(
                "LS-NET-02",
                f"launch.interface={interface} is {'down' if interface in states else 'not on this machine'}",
                f"name one that is up: {known}",
            )
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield Diagnosis.error(
            "LS-NET-03",
            f"a process cannot reach a port of its own machine: {error.strerror or error}",
            "look at the firewall's rules for the loopback interface",
        )
