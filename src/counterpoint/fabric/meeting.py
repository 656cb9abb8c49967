"""How ranks of different processes find each other: a store that one of them or their launcher keeps.

The store carries only who is here and why somebody stopped; nothing that a training run depends on passes through it.
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
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from torch.distributed import DistError

from counterpoint.errors import LaunchError, PeerError
from counterpoint.fabric.alike import require_alike, versions
from counterpoint.fabric.connections import Meeting, StoreLostError, await_keys, over_gloo
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import digest, ranks
from counterpoint.fabric.gloo import PrefixStore, ProcessGroupGloo, Store, TCPStore
from counterpoint.fabric.hosts.transport import HostsFabric
from counterpoint.fabric.mpi import MpiFabric, mpi_address
from counterpoint.fabric.shm.memory import Site
from counterpoint.fabric.shm.native import native
from counterpoint.fabric.shm.transport import ShmFabric
from counterpoint.fabric.torch_gloo import TorchFabric

NUM_TRIES = 3  # of torch's store, each as long as it is given
MEMBER_S = 2.0  # for a member that has just been seen to listen, and may have died since
PAUSE_S = 0.02  # between two looks whether somebody listens

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
    kept_by: Literal["rank 0", "launcher", "the oldest member"] = "rank 0"


def never() -> bool:
    """Tell that a wait is not in vain."""
    return False


def connect(  # noqa: PLR0913 - what a rank is told
    rank: int,
    num_ranks: int,
    address: Address,
    *,
    job: str = "job",
    generation: int = 0,
    deadline_s: float = 30.0,
    transport: Transport = "auto",
    host: str | None = None,
    facts: Mapping[str, str] | None = None,
    is_vain: Callable[[], bool] = never,
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
        return TorchFabric(rank, num_ranks, deadline_s, None)
    if transport == "mpi":
        address = Address(*mpi_address(rank, num_ranks, address.host, deadline_s))
    store = PrefixStore(f"counterpoint/{job}/{generation}", reach(rank, address, deadline_s, is_vain))
    site, place = Site(store, rank, num_ranks, tuple(range(num_ranks)), deadline_s), f"{address.host}:{address.port}"
    number = int.from_bytes(digest(job)[:8], "little")
    with meeting_at(place, rank, address.kept_by):
        places = announce(site, place, host or host_key(), facts or {}, is_vain)
        return joined(
            site, places, transport, number, generation,
            lambda: ProcessGroupGloo.create_device(hostname=interface_towards(address)),
        )  # fmt: skip


def join(store: Store, rank: int, num_ranks: int, *, deadline_s: float = 30.0, transport: Transport = "auto") -> Fabric:
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
        return TorchFabric(rank, num_ranks, deadline_s, None)
    place, number = "the store of their process group", int.from_bytes(digest("torch")[:8], "little")
    with meeting_at(place, rank, "whoever made it"):
        time_of_coming = PrefixStore("counterpoint", store).add(f"times/{rank}", 1)
        everybody = tuple(range(num_ranks))
        site = Site(PrefixStore(f"counterpoint/{time_of_coming}", store), rank, num_ranks, everybody, deadline_s)
        places = announce(site, place, host_key(), {})
        return joined(site, places, transport, number, time_of_coming, ProcessGroupGloo.create_default_device)


@contextmanager
def meeting_at(place: str, rank: int, keeper: str) -> Iterator[None]:
    """A store that goes away while ranks meet there is a PeerError that says who kept it.

    Raises:
        PeerError: it has gone away.
    """
    try:
        yield
    except (DistError, StoreLostError) as error:
        raise PeerError(
            f"rank {rank} lost {place} while the ranks were meeting there; {keeper} keeps it and has ended: look at "
            "its output"
        ) from error


def joined(
    site: Site,
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
    rank, num_ranks = site.rank, site.num_ranks
    if transport == "mpi":
        return MpiFabric(site, job, generation)
    if shares_memory(places, transport):
        return ShmFabric(site, job, generation)
    meeting = Meeting(site.store, over_gloo(device()), job, generation)
    far = TorchFabric(rank, num_ranks, site.deadline_s, meeting)
    hosts = host_numbers(places)
    if transport == "gloo" or len(set(hosts)) == num_ranks:
        return far
    here = tuple(other for other in range(num_ranks) if hosts[other] == hosts[rank])
    near = ShmFabric(replace(site, here=here), job, generation) if len(here) > 1 else None
    return HostsFabric(near, far, hosts)


def host_numbers(places: Sequence[tuple[str, str]]) -> list[int]:
    """Return the first rank of each rank's host; a rank that cannot share memory counts as a host of its own.

    Example:
        >>> host_numbers([("a", ""), ("b", ""), ("a", ""), ("a", "no native part")])
        [0, 1, 0, 3]
    """
    able = [host if not why else None for host, why in places]
    return [rank if host is None else able.index(host) for rank, host in enumerate(able)]


def reach(rank: int, address: Address, deadline_s: float, is_vain: Callable[[], bool] = never) -> TCPStore:
    """Return the store, which this rank starts where it is the one to keep it; a PeerError where nobody does."""
    timeout = timedelta(seconds=deadline_s)
    if rank == 0 and address.kept_by == "rank 0":
        listen_fd = listening(address) if address.listen_fd is None else address.listen_fd
        return TCPStore(
            address.host, address.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    try:
        await_listener(address, deadline_s, is_vain)
        calling = timeout / NUM_TRIES
        if address.kept_by == "the oldest member":
            calling = min(calling, timedelta(seconds=MEMBER_S))
        store = TCPStore(address.host, address.port, None, False, calling, wait_for_workers=False)
        store.set_timeout(timeout)
        return store
    except (DistError, OSError) as error:
        raise PeerError(
            f"rank {rank} found nobody at {address.host}:{address.port} within {deadline_s} s; "
            f"{address.kept_by} keeps the "
            "meeting place there: look at why it has not started, or give the address where it is"
        ) from error


def await_listener(address: Address, deadline_s: float, is_vain: Callable[[], bool] = never) -> None:
    """Somebody listens there; torch's store would look for up to three times its timeout.

    Raises:
        OSError: nobody has come to within the deadline, or until it was in vain.
    """
    end = time.monotonic() + deadline_s
    while True:
        left = end - time.monotonic()
        try:
            socket.create_connection((address.host, address.port), timeout=max(left, PAUSE_S)).close()
        except OSError:
            if left <= 0 or is_vain():
                raise
            time.sleep(PAUSE_S)
        else:
            return


def listening(address: Address) -> int:
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


def interface_towards(address: Address) -> str:
    """Return this machine's own address on the way to the meeting place."""
    family, kind, *_, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def asked_for(name: str | None) -> Transport:
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
        unable = [f"{ranks(elsewhere)}: on another host, or in another container, than rank 0"]
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


def announce(
    site: Site, place: str, host: str, facts: Mapping[str, str], is_vain: Callable[[], bool] = never
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
    store, rank, num_ranks = site.store, site.rank, site.num_ranks
    if store.add(f"count/{rank}", 1) != 1:
        raise PeerError(
            f"rank {rank} has come twice to {place}; a rank comes once per job and generation: give "
            "this job a name of its "
            "own, or raise its generation after a restart"
        )
    told = {"facts": {"ranks": num_ranks, **versions(), **facts}, "place": [host, native().reason], "pid": os.getpid()}
    store.set(f"here/{rank}", json.dumps(told))
    began = time.monotonic()
    lost = ""
    try:
        missing = await_keys(store, [f"here/{other}" for other in range(num_ranks)], site.deadline_s, is_vain)
    except StoreLostError as error:
        missing = list(error.missing)
        lost = ", and at why whoever kept the meeting place, rank 0 or a launcher, has ended"
    if missing:
        raise PeerError(
            f"rank {rank} waited {time.monotonic() - began:.1f} s at {place} for {ranks(missing)} "
            f"of {num_ranks}; all ranks must come within the deadline: look at why they did not start{lost}"
        )
    heard = [json.loads(store.get(f"here/{other}")) for other in range(num_ranks)]
    require_alike(place, [each["facts"] for each in heard])
    return [(str(host), str(why)) for host, why in (each["place"] for each in heard)]
