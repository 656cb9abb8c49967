r"""Rendezvous of the ranks of a job through a key-value store, and the choice of their transport.

::

    rank 0 ----\                     exchange_host_info        make_fabric
    rank 1 ------> KeyValueStore: versions, host, pid     -->  shm | gloo | hierarchical | process_group | mpi
    rank 2 ----/

The store carries only who has arrived, and why a rank aborted; no data of a training step passes through it.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch.distributed import DistError

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric.c10d import ProcessGroupGloo, Store, TCPStore
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import digest, format_ranks
from counterpoint.fabric.gloo.connections import Rendezvous, StoreLostError, gloo_connection_factory, wait_for_keys
from counterpoint.fabric.gloo.pair_proof import share_secret
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.hosts.transport import HierarchicalFabric
from counterpoint.fabric.key_value_store import STORE_JOB, KeyValueStore, RemoteTable, StoreServer, with_prefix
from counterpoint.fabric.mpi import MpiFabric, mpi_address
from counterpoint.fabric.process_group.backends import GLOO, NCCL, device_backend_name, nccl_rendezvous
from counterpoint.fabric.process_group.transport import ProcessGroupFabric, parts_of
from counterpoint.fabric.shm.memory import RankContext
from counterpoint.fabric.shm.native import native
from counterpoint.fabric.shm.transport import ShmFabric
from counterpoint.rpc.address import (
    RpcAddress,
    TcpAddress,
    UnixAddress,
    parse_address,
    resolve_address,
    start_connect,
)
from counterpoint.rpc.connection import ConnectionLostError, NoListenerError
from counterpoint.rpc.handshake import (
    HELLO,
    MAGIC,
    NONCE_BYTES,
    REFUSAL,
    JobCredentials,
    SecurityMode,
    hello_message,
)
from counterpoint.rpc.job_key import JobKey


def package_versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    try:
        own_version = version("counterpoint")
    except PackageNotFoundError:  # run from its source, not installed
        own_version = "of the source tree"
    return {"counterpoint": own_version, "torch": torch.__version__}


def check_ranks_match(address: str, attributes: Sequence[Mapping[str, object]]) -> None:
    """Check that all ranks were started with the same attributes.

    Args:
        address: the rendezvous address, for errors.
        attributes: by name, for each rank.

    Raises:
        PeerError: they differ.
    """
    for other, other_attributes in enumerate(attributes):
        differing = [name for name, value in other_attributes.items() if value != attributes[0].get(name)]
        if differing:
            differences = "; ".join(
                f"{name} {attributes[0].get(name)} on rank 0, {other_attributes[name]} on rank {other}"
                for name in differing
            )
            raise PeerError(
                f"the ranks at {address} differ: {differences}; all ranks of a job must be started with one number of "
                "ranks and one set of versions (install them from one constraints file)"
            )


NUM_TRIES = 3  # torch's store connects up to three times, each with the full timeout
POLL_S = 0.02
PROBE_S = 1.0
STORE_ADDRESS = "counterpoint/store"  # key of torchrun's store: where rank 0 serves the one that it trusts

Transport: TypeAlias = Literal["auto", "shm", "gloo", "process_group", "mpi"]


@dataclass(frozen=True, slots=True)
class Address:
    """Rendezvous address of a job.

    Attributes:
        host: a name of the interface that the job uses; loopback for ranks of one machine.
        port: where the store listens.
        listen_fd: a socket that already listens there, taken over by the rank that owns the store.
        store_owner: who serves the store: rank 0, the launcher (torchrun's agent), or a process that outlives the
            rendezvous; unless it is rank 0, all ranks are clients.
        reserves_port: whether rank 0 keeps the port from other jobs while it listens at a UNIX socket; not where
            torchrun's agent has it.
    """

    host: str
    port: int
    listen_fd: int | None = None
    store_owner: Literal["rank 0", "launcher", "the oldest member"] = "rank 0"
    reserves_port: bool = True


def never_cancel() -> bool:
    """Return False: never cancel a wait."""
    return False


def connect(  # noqa: PLR0913 - the description of a rank
    rank: int,
    num_ranks: int,
    address: Address,
    *,
    key: JobKey | None = None,
    job: str = "job",
    generation: int = 0,
    timeout_s: float = 30.0,
    transport: Transport = "auto",
    host: str | None = None,
    should_cancel: Callable[[], bool] = never_cancel,
) -> Fabric:
    """Return this rank's fabric when all ranks have arrived; otherwise raise a PeerError that names the missing ones.

    Args:
        rank: the own rank.
        num_ranks: the world size.
        address: where they meet.
        key: the job's, which ranks prove to each other; None for ranks of one host and user.
        job: distinguishes jobs that use one address.
        generation: distinguishes the ranks of one job before and after a restart.
        timeout_s: the longest that any wait may last.
        transport: ``shm`` for shared memory, ``gloo`` for sockets; ``auto`` uses shared memory within each host, where
            possible, and sockets between hosts, and NCCL for tensors on CUDA devices, where all ranks have some;
            ``process_group`` for c10d process groups, of NCCL where all ranks have CUDA devices, and else of gloo;
            ``mpi`` for ranks started by mpirun.
        host: ranks with equal names share memory; detected by default. Different names make ranks of one host behave
            like ranks of several.
        should_cancel: polled while waiting for others; whether to stop waiting, because they will not arrive.

    Raises:
        LaunchError: shared memory or MPI was requested and is unavailable on some rank; or the address is unknown, or
            beyond loopback without a key.
    """
    if num_ranks == 1:
        return GlooFabric(rank, num_ranks, timeout_s, None)
    if transport == "mpi":
        host_address, port, listen_fd, key = mpi_address(rank, num_ranks, address.host, timeout_s)
        address = Address(host_address, port, listen_fd)
    store = with_prefix(connect_store(rank, address, key, timeout_s, should_cancel), f"counterpoint/{job}/{generation}")
    context = RankContext(store, rank, num_ranks, tuple(range(num_ranks)), timeout_s)
    where, job_number = f"{address.host}:{address.port}", int.from_bytes(digest(job)[:8], "little")
    with translate_store_errors(where, rank, address.store_owner):
        host_infos = exchange_host_info(context, where, host or host_key(), should_cancel)
        return make_fabric(
            context, host_infos, transport, job_number, generation,
            lambda: ProcessGroupGloo.create_device(hostname=local_address_towards(address)),
        )  # fmt: skip


def connect_over_store(
    store: Store, rank: int, num_ranks: int, *, timeout_s: float = 30.0, transport: Transport = "auto"
) -> Fabric:
    """Return this rank's fabric among ranks that already share a store, such as a ``torch.distributed`` program.

    The ranks may connect repeatedly over one store: a rank's n-th call is matched with the others' n-th calls.

    Args:
        store: written to by these ranks only; its owner serves it for as long as the fabric is open.
        rank: the own rank.
        num_ranks: the world size.
        timeout_s: as in :func:`connect`.
        transport: as in :func:`connect`.

    Raises:
        LaunchError: as in :func:`connect`.
    """
    if num_ranks == 1:
        return GlooFabric(rank, num_ranks, timeout_s, None)
    where, job_number = "the store of their process group", int.from_bytes(digest("torch")[:8], "little")
    with translate_store_errors(where, rank, "its creator"):
        attempt = with_prefix(store, "counterpoint").add(f"times/{rank}", 1)
        all_ranks = tuple(range(num_ranks))
        context = RankContext(with_prefix(store, f"counterpoint/{attempt}"), rank, num_ranks, all_ranks, timeout_s)
        host_infos = exchange_host_info(context, where, host_key())
        return make_fabric(context, host_infos, transport, job_number, attempt, ProcessGroupGloo.create_default_device)


@contextmanager
def translate_store_errors(place: str, rank: int, store_owner: str) -> Iterator[None]:
    """Turn the loss of the store during the rendezvous into a PeerError that names its owner.

    Raises:
        PeerError: the store is gone.
    """
    try:
        yield
    except (DistError, StoreLostError) as error:
        raise PeerError(
            f"rank {rank} lost the rendezvous store ({place}); {store_owner} serves it and has ended: look at its "
            "output"
        ) from error


def make_fabric(
    context: RankContext,
    host_infos: Sequence[tuple[str, str]],
    transport: Transport,
    job: int,
    generation: int,
    device: Callable[[], ProcessGroupGloo.Device],
) -> Fabric:
    """Return the fabric for the ranks' placement.

    Args:
        context: this rank.
        host_infos: each rank's host, and why it cannot share memory; empty if it can.
        transport: the requested one.
        job: its number.
        generation: of its ranks.
        device: creates the device that gloo listens on.

    Raises:
        LaunchError: shared memory was requested and is unavailable.
    """
    if transport == "mpi":
        return MpiFabric(context, job, generation)
    has_devices = transport in {"auto", "process_group"} and all_have_device_backend(context)
    host = None
    if transport != "process_group":
        host = make_host_fabric(context, host_infos, transport, job, generation, device)
        if not has_devices:
            return host
    rendezvous = gloo_rendezvous(context, job, generation, device)
    # two gloo fabrics would use the same keys of the store
    control = next((part for part in parts_of(host) if isinstance(part, GlooFabric)), None) or GlooFabric(
        context.rank, context.num_ranks, context.timeout_s, rendezvous
    )
    if has_devices:
        return ProcessGroupFabric(host or control, control, nccl_rendezvous(rendezvous), NCCL)
    return ProcessGroupFabric(control, control, rendezvous, GLOO)


def make_host_fabric(
    context: RankContext,
    host_infos: Sequence[tuple[str, str]],
    transport: Transport,
    job: int,
    generation: int,
    device: Callable[[], ProcessGroupGloo.Device],
) -> Fabric:
    """Return the fabric of tensors in host memory; the arguments are those of :func:`make_fabric`."""
    rank, num_ranks = context.rank, context.num_ranks
    if shares_memory(host_infos, transport):
        return ShmFabric(context, job, generation)
    gloo = GlooFabric(rank, num_ranks, context.timeout_s, gloo_rendezvous(context, job, generation, device))
    hosts = host_ids(host_infos)
    if transport == "gloo" or len(set(hosts)) == num_ranks:
        return gloo
    members = tuple(other for other in range(num_ranks) if hosts[other] == hosts[rank])
    shm = ShmFabric(replace(context, local_ranks=members), job, generation) if len(members) > 1 else None
    return HierarchicalFabric(shm, gloo, hosts)


def gloo_rendezvous(
    context: RankContext, job: int, generation: int, device: Callable[[], ProcessGroupGloo.Device]
) -> Rendezvous:
    """Return the rendezvous of connections over gloo, whose ends prove that they are ranks of the job."""
    return Rendezvous(context.store, gloo_connection_factory(device()), job, generation, share_secret(context.store))


def all_have_device_backend(context: RankContext) -> bool:
    """Return whether all ranks have devices between which tensors can move; all ranks have announced themselves."""
    return bool(device_backend_name()) and all(
        json.loads(context.store.get(f"here/{other}"))["devices"] for other in range(context.num_ranks)
    )


def host_ids(host_infos: Sequence[tuple[str, str]]) -> list[int]:
    """Return, for each rank, the first rank of its host; a rank that cannot share memory counts as its own host.

    Example:
        >>> host_ids([("a", ""), ("b", ""), ("a", ""), ("a", "no native part")])
        [0, 1, 0, 3]
    """
    sharing_hosts = [host if not reason else None for host, reason in host_infos]
    return [rank if host is None else sharing_hosts.index(host) for rank, host in enumerate(sharing_hosts)]


def connect_store(
    rank: int,
    address: Address,
    key: JobKey | None,
    timeout_s: float,
    should_cancel: Callable[[], bool] = never_cancel,
) -> KeyValueStore | TCPStore:
    """Return the store, which this rank serves if it owns it; otherwise wait until another process serves it.

    Raises:
        LaunchError: the host name is unknown, cannot be listened at, or is beyond loopback without a key.
        PeerError: no process serves it within the timeout, or it is not this job's.
    """
    if address.store_owner == "launcher":
        agents_store = connect_launchers_store(rank, address, timeout_s, should_cancel)
        return agents_store if key is None else connect_announced_store(rank, address, key, timeout_s, agents_store)
    if rank == 0 and address.store_owner == "rank 0":
        server = serve_store(address, key)
        return KeyValueStore(server.table, timeout_s, server=server)
    target = store_address(address, key)
    return wait_for_store(rank, address, key, timeout_s, should_cancel, lambda: target)


def wait_for_store(
    rank: int,
    address: Address,
    key: JobKey | None,
    timeout_s: float,
    should_cancel: Callable[[], bool],
    find_address: Callable[[], RpcAddress],
) -> KeyValueStore:
    """Return a client of the store, once a process serves it.

    Raises:
        PeerError: no process serves it within the timeout, or it is not this job's.
    """
    end, probe_s = time.monotonic() + timeout_s, time.monotonic() + PROBE_S

    def is_over() -> bool:
        return time.monotonic() >= end or should_cancel()

    while True:
        try:
            values = RemoteTable(find_address(), JobCredentials(key, STORE_JOB), timeout_s, is_over)
            return KeyValueStore(values, timeout_s)
        except ConnectionLostError as error:
            if time.monotonic() > probe_s:
                require_same_kind(rank, address, has_key=key is not None)
                probe_s = time.monotonic() + PROBE_S
            if is_over():
                is_absent = isinstance(error, NoListenerError)
                raise no_store_error(rank, address, timeout_s, "" if is_absent else str(error)) from error
        except PeerError as error:
            raise PeerError(
                f"rank {rank} was answered at {address.host}:{address.port}, but not by this job's rendezvous store, "
                f"which {address.store_owner} serves: {error}"
            ) from error
        time.sleep(POLL_S)


def require_same_kind(rank: int, address: Address, *, has_key: bool) -> None:
    """Check that the store of this rendezvous does not listen as one with a key if this rank has none, or reversed.

    A rank without a key looks for a UNIX socket, one with a key for a TCP port: each would take the other for absent.

    Raises:
        PeerError: it does; the store notes this rank.
    """
    unkeyed = UnixAddress(f"rendezvous-{os.getuid()}-{address.port}")
    other: RpcAddress = unkeyed if has_key else TcpAddress(address.host, address.port)
    mode = SecurityMode.PEERCRED if has_key else SecurityMode.NONE
    try:
        with start_connect(other, is_keyed=True) as probe:
            probe.settimeout(PROBE_S)
            probe.sendall(hello_message(mode, secrets.token_bytes(NONCE_BYTES)) + REFUSAL)
            answer = probe.recv(HELLO.size, socket.MSG_WAITALL)
            probe.recv(1)  # until the store has refused it
    except (OSError, LaunchError):
        return
    if answer.startswith(MAGIC):
        has, lacks = ("this rank", address.store_owner) if has_key else (address.store_owner, "this rank")
        raise PeerError(
            f"rank {rank} was answered at {address.host}:{address.port}, but {has} has a job key and {lacks} has none; "
            "give all ranks the key of one job by --key-file or COUNTERPOINT_KEY_FILE"
        )


def connect_announced_store(
    rank: int, address: Address, key: JobKey, timeout_s: float, agents_store: TCPStore
) -> KeyValueStore:
    """Return a store that rank 0 serves to ranks with the key; only its address is in the store of torchrun's agent.

    Raises:
        PeerError: rank 0 does not serve it within the timeout, or another job does.
    """
    if rank == 0:
        server = serve_store(Address(local_address_towards(address), 0), key)
        agents_store.set(STORE_ADDRESS, str(server.address))
        return KeyValueStore(server.table, timeout_s, server=server)

    def find_address() -> RpcAddress:  # again for each attempt: the ranks before a restart have left theirs
        return parse_address(agents_store.get(STORE_ADDRESS).decode())

    return wait_for_store(rank, replace(address, store_owner="rank 0"), key, timeout_s, never_cancel, find_address)


def no_store_error(rank: int, address: Address, timeout_s: float, answer: str = "") -> PeerError:
    """Return the error for a store that does not answer.

    Args:
        rank: this rank.
        address: of the store.
        timeout_s: how long it has waited.
        answer: what happened to a connection that was accepted; empty if none was.
    """
    where, owner = f"{address.host}:{address.port}", address.store_owner
    if answer:
        return PeerError(
            f"rank {rank} was answered at {where}, but not by this job's rendezvous store within {timeout_s} s: "
            f"{answer}; {owner} serves it there: check whether {owner} is stopped, or another program has that port"
        )
    return PeerError(
        f"rank {rank} could not connect to {where} within {timeout_s} s; {owner} serves the rendezvous store there: "
        "check why it has not started, and that all ranks have its address and port (MASTER_ADDR, MASTER_PORT)"
    )


def store_address(address: Address, key: JobKey | None) -> RpcAddress:
    """Return where the store of this rendezvous address listens: without a key, a UNIX socket named after the port.

    Raises:
        LaunchError: the host name is unknown, or is beyond loopback and there is no key.
    """
    try:
        number = resolve_address(TcpAddress(address.host, address.port), is_keyed=True)[1][0]
    except LaunchError as error:
        raise LaunchError(f"the host of the rendezvous store is unknown here: {error}") from error
    if key is not None:
        return TcpAddress(address.host, address.port)
    if not ipaddress.ip_address(number.partition("%")[0]).is_loopback:
        raise LaunchError(
            f"this rank, on {socket.gethostname()}, has no job key, and {address.host}:{address.port} is beyond "
            "loopback, where anybody could join the job; write one (openssl rand -hex 32 > job.key; chmod 600 "
            "job.key), copy it to every host, and give it by --key-file or COUNTERPOINT_KEY_FILE"
        )
    return UnixAddress(f"rendezvous-{os.getuid()}-{address.port}")


def serve_store(address: Address, key: JobKey | None) -> StoreServer:
    """Return a store that this process serves at the rendezvous address, and at no other.

    Raises:
        LaunchError: the port is taken, the host is unknown, or beyond loopback and there is no key.
    """
    target = store_address(address, key)
    bound_socket = None
    if address.listen_fd is not None:
        bound_socket = socket.socket(fileno=address.listen_fd)
    elif address.reserves_port or isinstance(target, TcpAddress):
        bound_socket = bind_port(address)
    try:
        return StoreServer(target, JobCredentials(key, STORE_JOB), bound_socket)
    except BaseException:
        if bound_socket is not None:
            bound_socket.close()
        raise


def connect_launchers_store(
    rank: int, address: Address, timeout_s: float, should_cancel: Callable[[], bool] = never_cancel
) -> TCPStore:
    """Return a client of the store of torchrun's agent.

    Raises:
        PeerError: no process serves it.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        wait_for_listener(address, timeout_s, should_cancel)
        store = TCPStore(address.host, address.port, None, False, timeout / NUM_TRIES, wait_for_workers=False)
        store.set_timeout(timeout)
        return store
    except (DistError, OSError) as error:
        raise no_store_error(rank, address, timeout_s) from error


def wait_for_listener(address: Address, timeout_s: float, should_cancel: Callable[[], bool] = never_cancel) -> None:
    """Wait until a process listens at the address; torch's store would retry for up to three times its timeout.

    Raises:
        OSError: no process listens within the timeout, or the wait was cancelled.
    """
    end = time.monotonic() + timeout_s
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((address.host, address.port), timeout=max(left, POLL_S)).close()
        except OSError:
            if left <= 0 or should_cancel():
                raise
            time.sleep(POLL_S)
        else:
            return


def bind_port(address: Address) -> socket.socket:
    """Return a socket that is bound to the address and to no other interface.

    Raises:
        LaunchError: the port is taken, or the address is not of this machine.
    """
    try:
        return socket.create_server((address.host, address.port), backlog=1024)
    except OSError as error:
        remedy = "every job needs a port of its own: give another one, or end the program that has it"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "rank 0 runs on the host of this address: give one of this machine, or start rank 0 there"
        raise LaunchError(
            f"rank 0 cannot listen on {address.host}:{address.port}: {os.strerror(error.errno or 0).lower()}; {remedy}"
        ) from error


def local_address_towards(address: Address) -> str:
    """Return this machine's own address on the route to the rendezvous address."""
    family, kind, *_, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def parse_transport(name: str | None) -> Transport:
    """Return the transport of this name; ``auto`` if it is None.

    Raises:
        LaunchError: it does not exist.
    """
    transport = next((candidate for candidate in get_args(Transport) if candidate == (name or "auto")), None)
    if transport is None:
        raise LaunchError(f"there is no transport {name!r}; give one of {', '.join(get_args(Transport))}")
    return cast("Transport", transport)


def shares_memory(host_infos: Sequence[tuple[str, str]], transport: Transport) -> bool:
    """Return whether all ranks can share memory.

    Args:
        host_infos: each rank's host, and why it cannot share memory; empty if it can.
        transport: the requested one.

    Raises:
        LaunchError: shared memory was requested and is unavailable.
    """
    if transport == "gloo":
        return False
    obstacles = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(host_infos) if reason]
    on_other_hosts = [rank for rank, (host, _) in enumerate(host_infos) if host != host_infos[0][0]]
    if on_other_hosts and not obstacles:
        obstacles = [f"{format_ranks(on_other_hosts)}: on another host, or in another container, than rank 0"]
    if obstacles and transport == "shm":
        raise LaunchError(
            f"the ranks cannot share memory: {'; '.join(obstacles)}; transport='shm' needs ranks of one host and the "
            "native "
            "library of this package: use transport='auto', or see the output of counterpoint doctor"
        )
    return not obstacles


def host_key() -> str:
    """Return a key that is equal for processes that can share memory: same kernel, host name, container and user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    container = Path("/proc/self/ns/pid")
    kernel = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return f"{kernel} {socket.gethostname()} {Path(container).readlink() if container.exists() else ''} {os.getuid()}"


def exchange_host_info(
    context: RankContext,
    place: str,
    host: str,
    should_cancel: Callable[[], bool] = never_cancel,
) -> list[tuple[str, str]]:
    """Wait for all ranks; return each rank's host, and why it cannot share memory.

    Args:
        context: this rank.
        place: the rendezvous address, for errors.
        host: this rank's; ranks of one host could share memory.
        should_cancel: whether to stop waiting.

    Raises:
        PeerError: ranks are missing at the timeout, this rank was here before, or the ranks differ.
    """
    store, rank, num_ranks = context.store, context.rank, context.num_ranks
    if store.add(f"count/{rank}", 1) != 1:
        raise PeerError(
            f"rank {rank} has connected twice at {place}; a rank connects once per job and generation: give this job a "
            "name of its own, or raise its generation after a restart"
        )
    own_info = {
        "facts": {"ranks": num_ranks, **package_versions()},
        "place": [host, native().reason],
        "pid": os.getpid(),
        "devices": device_backend_name(),
    }
    store.set(f"here/{rank}", json.dumps(own_info))
    began = time.monotonic()
    hint = ""
    try:
        missing = wait_for_keys(
            store, [f"here/{other}" for other in range(num_ranks)], context.timeout_s, should_cancel
        )
    except StoreLostError as error:
        missing = list(error.missing)
        hint = ", and at why the owner of the store, rank 0 or a launcher, has ended"
    if missing:
        raise PeerError(
            f"rank {rank} waited {time.monotonic() - began:.1f} s at {place} for {format_ranks(missing)} "
            f"of {num_ranks}; all ranks must arrive within the timeout: look at why they did not start{hint}"
            f"{describe_refusals(store)}"
        )
    infos = [json.loads(store.get(f"here/{other}")) for other in range(num_ranks)]
    check_ranks_match(place, [info["facts"] for info in infos])
    return [(str(host), str(reason)) for host, reason in (info["place"] for info in infos)]


def describe_refusals(store: Store) -> str:
    """Return who was refused at the store because of its key, which may be a missing rank; empty if nobody was."""
    try:
        refusals = store.refusals() if isinstance(store, KeyValueStore) else []
    except DistError:  # it is gone
        refusals = []
    return f"; refused meanwhile: {'; '.join(refusals)}" if refusals else ""


class RendezvousStore:
    """A store served by this process, at which ranks meet in one generation after the other; close it.

    Args:
        host: the interface to listen on; loopback for ranks of one machine.
        key: of the job; None for ranks of one machine and user.

    Attributes:
        address: of the store; the port is a free one.

    Raises:
        LaunchError: cannot listen there.

    Example:
        >>> from counterpoint.fabric.rendezvous import connect
        >>> store = RendezvousStore("127.0.0.1")
        >>> [connect(0, 1, store.address, generation=generation).num_ranks for generation in (1, 2)]
        [1, 1]
        >>> store.close()
    """

    def __init__(self, host: str, key: JobKey | None = None) -> None:
        bound_socket = bind_port(Address(host, 0))
        self.address = Address(host, int(bound_socket.getsockname()[1]), store_owner="the oldest member")
        self._server = serve_store(replace(self.address, listen_fd=bound_socket.detach()), key)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.close()
