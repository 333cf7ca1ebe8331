"""The default process group: initialized once, destroyed on every exit."""

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.base.errors import LaunchError
from lockstep.base.world import World
from lockstep.core.distributed import flight_recorder, shared_gpu_group
from lockstep.core.distributed.authenticated_group import INTERFACES, Attempts, authenticate
from lockstep.core.distributed.authenticated_rendezvous import check_secrets, meet
from lockstep.protocol import run_secret
from lockstep.protocol.live_messages import is_live_worker, secret_of_run, slot_here
from lockstep.protocol.rendezvous import LOOPBACK, Endpoint, check_reachable, interface_to

if os.name != "nt":
    import resource

TIMEOUT_SECONDS = 1800.0
"""Timeout of a collective, unless launch.collective_timeout_seconds is set; data is prepared before the first one."""
TIMED_OUT = (
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "Application timeout caused pair closure",
)
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL communicator was aborted")
UNPROVEN = (
    "the processes of this run do not prove to each other that they belong to it: whoever reaches their ports could "
    f"take part. Set {run_secret.VARIABLE} to a folder of yours on all machines (docs/launching.md)"
)
_group_secret: list[bytes | None] = [None]
meetings: list[dist.Store] = []
"""Stores in which the current group was opened, and earlier ones; kept, since C++ does not keep their Python objects,
and the thread that watches for hangs may still use those of the last group."""


def device_of(world: World) -> torch.device:
    """Return the device of this process: GPU local_rank if there are GPUs, in turn where they are shared; else the CPU.
    Raises LaunchError when there are more processes than GPUs, which are not shared."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world.local_size > gpus and not world.shares_gpus:
        what = f"{world.local_size} processes but {gpus} GPU{'s' if gpus > 1 else ''} on this machine"
        raise LaunchError(f"{what}: set launch.processes={gpus}, or launch.share_gpus=true")
    slot = slot_here()  # one that joins later has local rank 0 until then
    return torch.device("cuda", (world.local_rank if slot is None else slot) % gpus)


def backend_of(world: World) -> str:
    """Return the backend of groups whose tensors may be on this process's device. Its name has "gloo" in it."""
    if not torch.cuda.is_available():
        return "gloo"
    has_nccl = dist.is_nccl_available() and not world.shares_gpus
    return "cpu:gloo,cuda:nccl" if has_nccl else shared_gpu_group.register()


def device_model(device: torch.device) -> str:
    """Return the name of the CPU or GPU: results may differ between models in the last bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error (of Gloo a plain RuntimeError) means that another process is lost or timed out."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in (*LOST_PEER, *TIMED_OUT))


def is_timeout(error: BaseException) -> bool:
    """Return whether such an error is a timeout."""
    return any(message in str(error) for message in TIMED_OUT)


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "the process group is not open"
    return group


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of a process group; of the default one, which further groups share, if none is given."""
    options: Any = getattr((group or world_group())._get_backend(torch.device("cpu")), "options", None)
    return options._timeout if options is not None else timedelta(seconds=TIMEOUT_SECONDS)  # of a fake group


def further_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Open another Gloo group of all ranks, by default with the default group's timeout. Collective, as `own_group`."""
    return own_group([range(dist.get_world_size())], backend="gloo", timeout=timeout)


def own_group(
    partition: Sequence[Sequence[int]], *, backend: str | None = None, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Open several groups that divide all ranks -> this rank's one; its members prove to belong to the run. Collective.

    `backend`: by default, those of the default group. With live recovery, raises PeerLost where a rank is lost before
    all are connected; else LaunchError where they cannot connect. Only the timeout wakes those that wait for a
    connection: hence a short one, which begins when all are there.
    """
    secret = None
    if dist.get_world_size() > 1 and dist.get_backend() != "fake":
        secret = secret_of_run() if is_live_worker() else _group_secret[0]
    limit = timeout or timeout_of()

    def open_own(short: timedelta) -> dist.ProcessGroup:
        groups = [dist.new_group(list(ranks), backend=backend, timeout=short) for ranks in partition]
        return next(g for ranks, g in zip(partition, groups, strict=True) if dist.get_rank() in ranks)

    if secret is None:
        return open_own(limit)
    store = dist.distributed_c10d._get_default_store()
    attempts = Attempts(store, secret, rank=dist.get_rank(), size=dist.get_world_size())
    return (attempts.once if is_live_worker() else attempts.until_proven)(open_own, limit)


def open_mesh(device: str, sizes: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Open a mesh of all ranks. Collective; raises as `own_group` does."""
    if dist.get_backend() == "fake":
        return init_device_mesh(device, sizes, mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    groups = [own_group(each.tolist()) for each in (ranks.T, ranks)]
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


@contextmanager
def opened(world: World, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Initialize the default process group (NCCL on GPUs of their own, with Gloo for CPU tensors; Gloo elsewhere)."""
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*")  # deprecated name in 2.13, same call
    if os.name != "nt":  # Gloo ends a process that cannot accept a connection, of any client
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
        if world.is_main:
            sys.stderr.write("TORCH_DISTRIBUTED_DEBUG=DETAIL counts as INFO: torch crashes in DDP on Gloo with it\n")
    with (
        on_loopback(is_single_node=world.local_size == world.size),
        _initialized(world, device, timedelta(seconds=timeout_seconds)),
    ):
        yield


def joined() -> World:
    """Return the processes of the group that a script has opened itself; else open one, until the process ends. Raises
    LaunchError where a script's own group has no backend for tensors on the CPU."""
    world = World.from_environment()
    if not dist.is_initialized():
        stack = ExitStack()
        stack.enter_context(opened(world, device_of(world)))
        atexit.register(stack.close)
        return world
    if "gloo" not in dist.get_backend_config():
        what = "the process group has no backend for the CPU: leave out init_process_group"
        raise LaunchError(f'{what}, or give it "cpu:gloo,cuda:nccl"')
    rank, size = dist.get_rank(), dist.get_world_size()
    _group_secret[:] = [None]
    if (world.rank, world.size) == (rank, size):
        if size > 1:
            _group_secret[:] = [run_secret.of_process(world)]
            store = dist.distributed_c10d._get_default_store()
            check_secrets(store, world, _group_secret[0], timeout=timeout_of())
            if _group_secret[0] is not None:
                authenticate(world_group(), _group_secret[0])
        return world
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


@contextmanager
def on_loopback(*, is_single_node: bool) -> Iterator[None]:
    """Bind Gloo and NCCL to the loopback interface on a single node, unless another is set: their default is the
    interface of the machine's host name, which other machines may reach. Raises LaunchError where it is down."""
    own, loopback = Endpoint(host=LOOPBACK, port=9), None
    if is_single_node:
        check_reachable(own)
        loopback = interface_to(own)
    ours = [name for name in INTERFACES if loopback and name not in os.environ]
    os.environ.update(dict.fromkeys(ours, loopback or ""))  # until exit: groups that are created later read them, too
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _open(world: World, timeout: timedelta) -> None:
    """Open the default group of several processes. Raises LaunchError."""
    flight_recorder.enable(backend := backend_of(world))
    secret = run_secret.of_process(world)
    store = meet(world, secret, timeout)
    meetings.append(store)
    _group_secret[:] = [secret]
    if secret is None:
        if world.is_main:
            sys.stderr.write(f"{UNPROVEN}\n")
        dist.init_process_group(backend, store=store, timeout=timeout, rank=world.rank, world_size=world.size)
        return

    def open_default(short: timedelta) -> dist.ProcessGroup:
        own = dist.PrefixStore(f"default-{attempts.number}", store)
        dist.init_process_group(backend, store=own, timeout=short, rank=world.rank, world_size=world.size)
        return world_group()

    attempts = Attempts(store, secret, rank=world.rank, size=world.size)
    attempts.until_proven(open_default, timeout)


@contextmanager
def _initialized(world: World, device: torch.device, timeout: timedelta) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.size > 1:
        _open(world, timeout)
    else:  # NCCL connects at its first collective, which ddp has none of
        dist.init_process_group(backend_of(world), store=dist.HashStore(), timeout=timeout, rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # live recovery may have abandoned it
            dist.destroy_process_group()
