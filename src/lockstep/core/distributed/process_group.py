"""The default process group: initialized once, destroyed on every exit."""

import atexit
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.base.errors import LaunchError, PeerLost
from lockstep.base.world import World
from lockstep.core.distributed.peer_proof import authenticate
from lockstep.launch.elastic.live_notes import is_live_worker, secret_of_run, store_at
from lockstep.launch.elastic.rendezvous import LOOPBACK, Endpoint, interface_to

TIMEOUT_SECONDS = 1800.0
"""Of a collective, unless launch.collective_timeout_seconds says otherwise; data is prepared before the first one."""
CONNECT_SECONDS = 5.0
"""With live recovery, how long processes may take to connect to each other once all are there."""
TIMED_OUT = (
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "Application timeout caused pair closure",
)
NOT_CONNECTED = "connectFullMesh failed"
"""Of Gloo, when the processes have met but cannot open connections to each other."""
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
)


def device_of(world: World) -> torch.device:
    """The device of this process: GPU local_rank if there are GPUs, else the CPU.

    Raises LaunchError when there are more processes than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local_size > torch.cuda.device_count():
        raise LaunchError(
            f"{world.local_size} processes but {torch.cuda.device_count()} GPUs on this machine: "
            f"set launch.processes={torch.cuda.device_count()}"
        )
    return torch.device("cuda", world.local_rank)


def device_model(device: torch.device) -> str:
    """The name of the CPU or GPU: results may differ between models in the last bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error means that another process is lost, or was waited for too long; Gloo raises a plain
    RuntimeError."""
    if isinstance(error, dist.DistNetworkError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in (*LOST_PEER, *TIMED_OUT))


def is_timeout(error: BaseException) -> bool:
    """Whether such an error means that another process was waited for too long."""
    return any(message in str(error) for message in TIMED_OUT)


def world_group() -> dist.ProcessGroup:
    """The default process group."""
    group = dist.group.WORLD
    assert group is not None, "the process group is not open"
    return group


def timeout() -> timedelta:
    """The timeout of the default process group, which groups of their own are to share."""
    options = world_group()._get_backend(torch.device("cpu")).options
    return options._timeout


def further_group(timeout: timedelta) -> dist.ProcessGroup:
    """Another Gloo group of all ranks. Collective.

    With live recovery, raises PeerLost where a rank is lost before all are connected. Nothing wakes those that wait for
    its connection but the timeout: hence a short one, which begins when all are there.
    """
    if not is_live_worker() or dist.get_world_size() == 1:
        return dist.new_group(backend="gloo", timeout=timeout)
    return _among_live([list(range(dist.get_world_size()))], timeout)


def own_group(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """This rank's one of several Gloo groups that divide all ranks, with live recovery. Collective; raises as
    `further_group` does."""
    return _among_live(partition, timeout())


def _among_live(partition: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Open the groups of a partition of all ranks -> this rank's one, once its members have proved who they are."""
    dist.all_reduce(torch.zeros(1))
    try:
        short = timedelta(seconds=CONNECT_SECONDS)
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=short) for ranks in partition]
    except RuntimeError as error:
        if NOT_CONNECTED not in str(error) and not isinstance(error, dist.DistStoreError):
            raise
        raise PeerLost("a process was lost while another group was opened") from None
    (group,) = (group for ranks, group in zip(partition, groups, strict=True) if dist.get_rank() in ranks)
    authenticate(group, secret_of_run())
    dist.distributed_c10d._set_pg_timeout(timeout, group)
    return group


@contextmanager
def opened(world: World, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Initialize the default process group (NCCL on GPUs, with Gloo for CPU tensors; Gloo elsewhere)."""
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*")  # deprecated name in 2.13, same call
    with (
        on_loopback(is_single_node=world.local_size == world.size),
        _initialized(world, device, timedelta(seconds=timeout_seconds)),
    ):
        yield


def joined() -> World:
    """The processes of the group that a script has opened itself; else open one, until the process ends.

    Raises LaunchError where a script's own group has no backend for tensors on the CPU.
    """
    world = World.from_environment()
    if not dist.is_initialized():
        stack = ExitStack()
        stack.enter_context(opened(world, device_of(world)))
        atexit.register(stack.close)
        return world
    if "gloo" not in dist.get_backend_config():
        raise LaunchError(
            "the process group has no backend for the CPU: leave out init_process_group, or give it "
            '"cpu:gloo,cuda:nccl"'
        )
    rank, size = dist.get_rank(), dist.get_world_size()
    if (world.rank, world.size) == (rank, size):
        return world
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@contextmanager
def on_loopback(*, is_single_node: bool) -> Iterator[None]:
    """On a single node, bind Gloo and NCCL to the loopback interface unless another is set: their default is the
    interface of the machine's host name, which other machines may reach."""
    loopback = interface_to(Endpoint(host=LOOPBACK, port=9)) if is_single_node else None
    ours = [name for name in INTERFACES if loopback and name not in os.environ]
    os.environ.update(dict.fromkeys(ours, loopback or ""))  # until exit: groups that are created later read them, too
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _not_connected(world: World, reason: str) -> LaunchError:
    interface = os.environ.get(INTERFACES[0])
    through = f"the network interface {interface}" if interface else "the network"
    return LaunchError(
        f"rank {world.rank} on {platform.node()} cannot connect to another process through {through} "
        f"({reason.rpartition('] ')[2]}): set launch.interface to one by which the machines reach each other, and let "
        "them connect to any port of each other (LS-NET-05)",
        code="LS-NET-05",
    )


@contextmanager
def _initialized(world: World, device: torch.device, timeout: timedelta) -> Iterator[None]:
    if world.size > 1:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        store, is_live = None, is_live_worker()
        if is_live:
            meeting = Endpoint(host=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
            store = store_at(meeting, timeout=timeout)
        try:
            dist.init_process_group(backend, store=store, timeout=timeout, rank=world.rank, world_size=world.size)
        except RuntimeError as error:
            if NOT_CONNECTED not in str(error):
                raise
            raise _not_connected(world, str(error)) from None
        if is_live:
            authenticate(world_group(), secret_of_run())
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), timeout=timeout, rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # with live recovery it may have been given up
            dist.destroy_process_group()
