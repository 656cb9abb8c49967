"""What must be the same on all ranks that meet: checked before the first of them computes anything.

How ranks of different processes find each other: a store that one of them or their launcher keeps.

The store carries only who is here and why somebody stopped; nothing that a training run depends on passes through it.

A place where ranks meet again and again: one of them keeps it for as long as it lives.
"""

from __future__ import annotations

import json
import os
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
from counterpoint.fabric.c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import digest, format_ranks
from counterpoint.fabric.gloo.connections import Rendezvous, StoreLostError, gloo_connection_factory, wait_for_keys
from counterpoint.fabric.gloo.transport import GlooFabric
from counterpoint.fabric.hosts.transport import HierarchicalFabric
from counterpoint.fabric.mpi import MpiFabric, mpi_address
from counterpoint.fabric.shm.memory import RankContext
from counterpoint.fabric.shm.native import native
from counterpoint.fabric.shm.transport import ShmFabric


def package_versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    try:
        own = version("counterpoint")
    except PackageNotFoundError:  # run from its source, not installed
        own = "of the source tree"
    return {"counterpoint": own, "torch": torch.__version__}


def check_ranks_match(address: str, attributes: Sequence[Mapping[str, object]]) -> None:
    """All ranks were started alike.

    Args:
        place: where they meet, for errors.
        facts: what each rank says of itself, by name.

    Raises:
        PeerError: they were not.
    """
    for other, theirs in enumerate(attributes):
        differing = [name for name, value in theirs.items() if value != attributes[0].get(name)]
        if differing:
            which = "; ".join(
                f"{name} {attributes[0].get(name)} on rank 0, {theirs[name]} on rank {other}" for name in differing
            )
            raise PeerError(
                f"the ranks at {address} differ: {which}; all ranks of a job must be started with one number of ranks, "
                "one set of versions (install them from one constraints file) and one job key (copy it to every host)"
            )


NUM_TRIES = 3  # of torch's store, each as long as it is given
MEMBER_TIMEOUT_S = 2.0  # for a member that has just been seen to listen, and may have died since
POLL_S = 0.02  # between two looks whether somebody listens

Transport: TypeAlias = Literal["auto", "shm", "gloo", "mpi"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the ranks of a job meet.

    Attributes:
        host: the interface that this job uses is the one this name leads to; loopback for ranks of one machine.
        port: where the store listens.
        listen_fd: a socket that already listens there, for the rank that keeps the store; it is taken over.
        kept_by: who keeps the store: rank 0; or the launcher (torchrun's agent does) or a process that keeps it for
            longer than the ranks meet, and then all ranks are guests.
    """

    host: str
    port: int
    listen_fd: int | None = None
    store_owner: Literal["rank 0", "launcher", "the oldest member"] = "rank 0"


def never_cancel() -> bool:
    """Tell that a wait is not in vain."""
    return False


def connect(  # noqa: PLR0913 - what a rank is told
    rank: int,
    num_ranks: int,
    address: Address,
    *,
    job: str = "job",
    generation: int = 0,
    timeout_s: float = 30.0,
    transport: Transport = "auto",
    host: str | None = None,
    attributes: Mapping[str, str] | None = None,
    should_cancel: Callable[[], bool] = never_cancel,
) -> Fabric:
    """Return this rank's fabric: all ranks have arrived and run the same versions; otherwise a PeerError names who.

    Args:
        rank: the own rank.
        num_ranks: how many there are.
        address: where they meet.
        job: tells jobs apart that meet at one address.
        generation: tells apart the ranks of one job before and after a restart.
        deadline_s: the longest that any wait may last.
        transport: ``shm`` for shared memory, ``gloo`` for sockets; ``auto`` takes shared memory among the ranks of each
            host that can, and sockets between hosts; ``mpi`` for MPI, where mpirun has started the ranks.
        host: ranks of equal names share memory; found out where it is left out. Another name keeps ranks of one host
            apart, as if they were on two.
        facts: what else must be the same on all ranks, by name, beside versions.
        is_vain: asked while others are waited for: whether to wait no longer, because they will not come.

    Raises:
        LaunchError: shared memory or MPI was asked for, and some rank has none or is on another host.
    """
    if num_ranks == 1:
        return GlooFabric(rank, num_ranks, timeout_s, None)
    if transport == "mpi":
        address = Address(*mpi_address(rank, num_ranks, address.host, timeout_s))
    store = PrefixStore(f"counterpoint/{job}/{generation}", connect_store(rank, address, timeout_s, should_cancel))
    site, place = (
        RankContext(store, rank, num_ranks, tuple(range(num_ranks)), timeout_s),
        f"{address.host}:{address.port}",
    )
    number = int.from_bytes(digest(job)[:8], "little")
    with translate_store_errors(place, rank, address.store_owner):
        places = exchange_host_info(site, place, host or host_key(), attributes or {}, should_cancel)
        return make_fabric(
            site, places, transport, number, generation,
            lambda: ProcessGroupGloo.create_device(hostname=local_address_towards(address)),
        )  # fmt: skip


def connect_over_store(
    store: Store, rank: int, num_ranks: int, *, timeout_s: float = 30.0, transport: Transport = "auto"
) -> Fabric:
    """Return this rank's fabric among the ranks that have a store in common already, as a program of torch has.

    They may come again to the same store: whoever comes for the third time meets those that do, too.

    Args:
        store: what only these ranks write to; whoever keeps it does so for as long as the fabric is open.
        rank: the own rank.
        num_ranks: how many there are.
        deadline_s: as in :func:`connect`.
        transport: as in :func:`connect`.

    Raises:
        LaunchError: as in :func:`connect`.
    """
    if num_ranks == 1:
        return GlooFabric(rank, num_ranks, timeout_s, None)
    place, number = "the store of their process group", int.from_bytes(digest("torch")[:8], "little")
    with translate_store_errors(place, rank, "whoever made it"):
        time_of_coming = PrefixStore("counterpoint", store).add(f"times/{rank}", 1)
        everybody = tuple(range(num_ranks))
        site = RankContext(PrefixStore(f"counterpoint/{time_of_coming}", store), rank, num_ranks, everybody, timeout_s)
        places = exchange_host_info(site, place, host_key(), {})
        return make_fabric(site, places, transport, number, time_of_coming, ProcessGroupGloo.create_default_device)


@contextmanager
def translate_store_errors(place: str, rank: int, store_owner: str) -> Iterator[None]:
    """A store that goes away while ranks meet there is a PeerError that says who kept it.

    Raises:
        PeerError: it has gone away.
    """
    try:
        yield
    except (DistError, StoreLostError) as error:
        raise PeerError(
            f"rank {rank} lost {place} while the ranks were meeting there; {store_owner} keeps it and has ended: look at "
            "its output"
        ) from error


def make_fabric(
    context: RankContext,
    places: Sequence[tuple[str, str]],
    transport: Transport,
    job: int,
    generation: int,
    device: Callable[[], ProcessGroupGloo.Device],
) -> Fabric:
    """Return the fabric that fits where the ranks are.

    Args:
        site: who this rank is.
        places: each rank's host, and why it cannot share memory; empty where it can.
        transport: what was asked for.
        job: its number.
        generation: of its ranks.
        device: makes what gloo listens on.

    Raises:
        LaunchError: shared memory was asked for, and cannot be had.
    """
    rank, num_ranks = context.rank, context.num_ranks
    if transport == "mpi":
        return MpiFabric(context, job, generation)
    if shares_memory(places, transport):
        return ShmFabric(context, job, generation)
    meeting = Rendezvous(context.store, gloo_connection_factory(device()), job, generation)
    far = GlooFabric(rank, num_ranks, context.timeout_s, meeting)
    hosts = host_ids(places)
    if transport == "gloo" or len(set(hosts)) == num_ranks:
        return far
    here = tuple(other for other in range(num_ranks) if hosts[other] == hosts[rank])
    near = ShmFabric(replace(context, local_ranks=here), job, generation) if len(here) > 1 else None
    return HierarchicalFabric(near, far, hosts)


def host_ids(places: Sequence[tuple[str, str]]) -> list[int]:
    """Return the first rank of each rank's host; a rank that cannot share memory counts as a host of its own.

    Example:
        >>> host_numbers([("a", ""), ("b", ""), ("a", ""), ("a", "no native part")])
        [0, 1, 0, 3]
    """
    able = [host if not why else None for host, why in places]
    return [rank if host is None else able.index(host) for rank, host in enumerate(able)]


def connect_store(
    rank: int, address: Address, timeout_s: float, should_cancel: Callable[[], bool] = never_cancel
) -> TCPStore:
    """Return the store, which this rank starts where it is the one to keep it; a PeerError where nobody does."""
    timeout = timedelta(seconds=timeout_s)
    if rank == 0 and address.store_owner == "rank 0":
        listen_fd = open_listener(address) if address.listen_fd is None else address.listen_fd
        return TCPStore(
            address.host, address.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    try:
        wait_for_listener(address, timeout_s, should_cancel)
        calling = timeout / NUM_TRIES
        if address.store_owner == "the oldest member":
            calling = min(calling, timedelta(seconds=MEMBER_TIMEOUT_S))
        store = TCPStore(address.host, address.port, None, False, calling, wait_for_workers=False)
        store.set_timeout(timeout)
        return store
    except (DistError, OSError) as error:
        raise PeerError(
            f"rank {rank} found nobody at {address.host}:{address.port} within {timeout_s} s; "
            f"{address.store_owner} keeps the "
            "meeting place there: look at why it has not started, or give the address where it is"
        ) from error


def wait_for_listener(address: Address, timeout_s: float, should_cancel: Callable[[], bool] = never_cancel) -> None:
    """Somebody listens there; torch's store would look for up to three times its timeout.

    Raises:
        OSError: nobody has come to within the deadline, or until it was in vain.
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


def open_listener(address: Address) -> int:
    """Return a socket that listens on the address and on no other interface.

    Raises:
        LaunchError: the port is taken.
    """
    try:
        return socket.create_server((address.host, address.port), backlog=1024).detach()
    except OSError as error:
        raise LaunchError(
            f"rank 0 cannot listen on {address.host}:{address.port}: "
            f"{os.strerror(error.errno or 0).lower()}; every job needs "
            "a port of its own: give another one, or end the program that has it"
        ) from error


def local_address_towards(address: Address) -> str:
    """Return this machine's own address on the way to the meeting place."""
    family, kind, *_, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def parse_transport(name: str | None) -> Transport:
    """Return the transport of this name; ``auto`` where none was asked for.

    Raises:
        LaunchError: there is none of this name.
    """
    found = next((each for each in get_args(Transport) if each == (name or "auto")), None)
    if found is None:
        raise LaunchError(f"there is no transport {name!r}; give one of {', '.join(get_args(Transport))}")
    return cast("Transport", found)


def shares_memory(places: Sequence[tuple[str, str]], transport: Transport) -> bool:
    """Tell whether the ranks are joined by shared memory.

    Args:
        places: each rank's host, and why it cannot share memory; empty where it can.
        transport: what was asked for.

    Raises:
        LaunchError: shared memory was asked for, and cannot be had.
    """
    if transport == "gloo":
        return False
    unable = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(places) if why]
    elsewhere = [rank for rank, (host, _) in enumerate(places) if host != places[0][0]]
    if elsewhere and not unable:
        unable = [f"{format_ranks(elsewhere)}: on another host, or in another container, than rank 0"]
    if unable and transport == "shm":
        raise LaunchError(
            f"the ranks cannot share memory: {'; '.join(unable)}; transport='shm' is for ranks of one host with the "
            "native part of this package: take transport='auto', or look at what counterpoint doctor says"
        )
    return not unable


def host_key() -> str:
    """Return what is equal for processes that can open each other's memory: same kernel, host name, container, user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    container = Path("/proc/self/ns/pid")
    kernel = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return f"{kernel} {socket.gethostname()} {Path(container).readlink() if container.exists() else ''} {os.getuid()}"


def exchange_host_info(
    context: RankContext,
    place: str,
    host: str,
    attributes: Mapping[str, str],
    should_cancel: Callable[[], bool] = never_cancel,
) -> list[tuple[str, str]]:
    """Return each rank's host, and why it cannot share memory: all are here, and were started alike.

    Args:
        site: who this rank is, and whom it meets.
        place: where, for errors.
        host: this rank's; ranks of one host could share memory.
        facts: what else must be the same on all ranks, by name.
        is_vain: whether to wait no longer.

    Raises:
        PeerError: some are not, when the deadline passes; this rank was here before; or the ranks differ.
    """
    store, rank, num_ranks = context.store, context.rank, context.num_ranks
    if store.add(f"count/{rank}", 1) != 1:
        raise PeerError(
            f"rank {rank} has come twice to {place}; a rank comes once per job and generation: give "
            "this job a name of its "
            "own, or raise its generation after a restart"
        )
    told = {
        "facts": {"ranks": num_ranks, **package_versions(), **attributes},
        "place": [host, native().reason],
        "pid": os.getpid(),
    }
    store.set(f"here/{rank}", json.dumps(told))
    began = time.monotonic()
    lost = ""
    try:
        missing = wait_for_keys(
            store, [f"here/{other}" for other in range(num_ranks)], context.timeout_s, should_cancel
        )
    except StoreLostError as error:
        missing = list(error.missing)
        lost = ", and at why whoever kept the meeting place, rank 0 or a launcher, has ended"
    if missing:
        raise PeerError(
            f"rank {rank} waited {time.monotonic() - began:.1f} s at {place} for {format_ranks(missing)} "
            f"of {num_ranks}; all ranks must come within the deadline: look at why they did not start{lost}"
        )
    heard = [json.loads(store.get(f"here/{other}")) for other in range(num_ranks)]
    check_ranks_match(place, [each["facts"] for each in heard])
    return [(str(host), str(why)) for host, why in (each["place"] for each in heard)]


STORE_TIMEOUT_S = 30.0  # that its own keeper waits for the store, which is in the same process


class RendezvousStore:
    """A store that this process keeps, where ranks meet in one generation after the other; close it.

    Args:
        host: the interface to listen on; loopback for ranks of one machine.

    Attributes:
        address: where it is; the port is any that was free.

    Raises:
        LaunchError: nothing can listen there.

    Example:
        >>> from counterpoint.fabric.rendezvous import connect
        >>> place = StandingPlace("127.0.0.1")
        >>> [connect(0, 1, place.address, generation=generation).num_ranks for generation in (1, 2)]
        [1, 1]
        >>> place.close()
    """

    def __init__(self, host: str) -> None:
        listen_fd = open_listener(Address(host, 0))
        with socket.socket(fileno=os.dup(listen_fd)) as known:
            port = int(known.getsockname()[1])
        self.address = Address(host, port, store_owner="the oldest member")
        self._store: TCPStore | None = TCPStore(
            host,
            port,
            None,
            True,
            timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )

    def close(self) -> None:
        """Nobody meets here any more; a second call does nothing."""
        self._store = None
