"""``counterpoint doctor``: find problems of this machine for training, and their fixes."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.error_handling import FAILED
from counterpoint.device.inventory import DeviceInventory, read_driver
from counterpoint.launchers.machine import place_on_this_host, this_host
from counterpoint.launchers.variables import (
    ALLOCATOR_VARIABLES,
    THREADS_VARIABLE,
    allocator_variables,
    requested_threads,
)
from counterpoint.world.cpu_affinity import DEFAULT_BINDING, Binding
from counterpoint.world.known_clusters import find_gpu_name

if TYPE_CHECKING:
    from counterpoint.profiler.torch_build import TorchBuild

Grade = Literal["good", "note", "hurts", "broken"]
OLDEST_TORCH = (2, 11)
TRIED_TORCH = "2.13.0"
RANKS_SHOWN = 8
LEAST_FREE = 0.5
"""If a smaller share of a GPU's memory is free, it is a finding that hurts."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        subject: what was checked.
        grade: how bad it is.
        fact: what was found, with values.
        fix: what to do; empty if nothing.
    """

    subject: str
    grade: Grade
    fact: str
    fix: str = ""


def doctor(
    *,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Number of ranks to run here.")] = 2,
) -> None:
    """Check what training needs on this machine; exit with 1 if something is broken."""
    findings = [finding for check in CHECKS for finding in check(ranks)]
    for finding in findings:
        fix = f"; {finding.fix}" if finding.fix else ""
        echo(f"{finding.grade:<7} {finding.subject:<12} {finding.fact}{fix}")
    broken = [finding.subject for finding in findings if finding.grade == "broken"]
    if broken:
        echo(f"\nbroken: {', '.join(broken)}; training will not work until that is fixed")
        raise typer.Exit(FAILED)
    hurting = sum(finding.grade == "hurts" for finding in findings)
    echo(f"\nnothing is broken, {hurting} of {len(findings)} checks hurt")


def check_python(_ranks: int) -> Iterator[Finding]:
    """Check the interpreter."""
    yield Finding("python", "good", f"Python {platform.python_version()}")


def check_torch(_ranks: int) -> Iterator[Finding]:
    """Check torch and its communication between processes."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "broken", "torch is not installed", f"pip install torch=={TRIED_TORCH}")
        return
    import torch

    from counterpoint.device.cuda import count_gpus
    from counterpoint.fabric.c10d import is_available
    from counterpoint.fabric.shm.native import native

    version = torch.__version__
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        yield Finding("torch", "broken", f"torch {version}", f"install 2.11 or newer; {TRIED_TORCH} is what is tested")
    elif "+cu" in version and not count_gpus() and not read_driver(Path("/"))[1]:
        yield Finding(
            "torch", "hurts", f"torch {version} brings CUDA, but there is no GPU", "a CPU build saves gigabytes"
        )
    else:
        tried = "" if version.split("+")[0] == TRIED_TORCH else f" (tested with {TRIED_TORCH})"
        yield Finding("torch", "good", f"torch {version}{tried}")
    if not is_available():
        yield Finding(
            "gloo", "broken", "this torch has no gloo", "install a build with it: ranks of several hosts need it"
        )
    else:
        yield Finding("gloo", "good", "gloo is available, for ranks of several hosts")
    library = native()
    if library.library is None:
        yield Finding(
            "shared memory",
            "hurts",
            f"the native extension is missing: {library.reason}; ranks of one host communicate through gloo's "
            "sockets, many "
            "times slower",
            "install a C++17 compiler (apt install g++) and this package again",
        )
    else:
        yield Finding("shared memory", "good", f"the native extension is available and uses {library.instruction_set}")


def check_build(_ranks: int) -> Iterator[Finding]:
    """Check the libraries and instruction sets that torch computes with."""
    if importlib.util.find_spec("torch") is None:
        return
    from counterpoint.profiler.torch_build import read_torch_build

    yield from judge_build(read_torch_build())


def judge_build(build: TorchBuild) -> Iterator[Finding]:
    """Yield what torch computes with, and a finding for everything of it that costs speed."""
    from counterpoint.profiler.torch_build import find_speed_costs

    yield Finding("built with", "good", str(build))
    for cost in find_speed_costs(build):
        yield Finding(cost.subject, cost.grade, f"{cost.cause}: {cost.rule}", cost.remedy)


def check_devices(ranks: int) -> Iterator[Finding]:
    """Check the GPUs that this process sees."""
    if importlib.util.find_spec("torch") is None:
        return
    from counterpoint.device.cuda import take_inventory
    from counterpoint.launchers.variables import visibility_variables

    yield from judge_devices(take_inventory(visibility_variables()), ranks)


def judge_devices(inventory: DeviceInventory, ranks: int) -> Iterator[Finding]:
    """Yield the findings about the GPUs of an inventory, and about ranks that would use them."""
    num_gpus = len(inventory.gpus)
    yield from _judge_visibility(inventory)
    if not num_gpus:
        if inventory.num_on_host == 0:
            yield Finding("GPUs", "hurts", f"driver {inventory.driver} has no GPU", "look at dmesg and nvidia-smi")
        return
    for index, gpu in enumerate(inventory.gpus):
        free, total = gpu.free_bytes / 2**30, gpu.total_bytes / 2**30
        is_used = gpu.free_bytes < LEAST_FREE * gpu.total_bytes
        fix = "another program uses the rest: nvidia-smi names it; end it, or choose another GPU" if is_used else ""
        fact = f"{gpu.name}, {free:.1f} of {total:.1f} GiB free"
        yield Finding(f"cuda:{index}", "hurts" if is_used else "good", fact, fix)
    yield from _judge_links(inventory)
    driver = f"driver {inventory.driver or 'of an unknown version'}, torch's {inventory.runtime}"
    yield Finding("GPU driver", "good", driver)
    if inventory.nccl is not None:
        yield Finding("NCCL", "good", f"NCCL {inventory.nccl}")
    known = find_gpu_name(inventory.gpus[0].name, inventory.gpus[0].total_bytes)
    if known is not None:
        fact = f"plan --cluster {known} predicts these GPUs from a roofline of their data sheet, not from a measurement"
        yield Finding("GPU plans", "good", fact)
    if ranks > 1:
        yield _judge_ranks(ranks, num_gpus)


def _judge_visibility(inventory: DeviceInventory) -> Iterator[Finding]:
    num_gpus, on_host = len(inventory.gpus), inventory.num_on_host
    if not num_gpus and not on_host:
        return
    of_host = "" if on_host is None else f" of {on_host}"
    for name, value in inventory.visible:
        num_named = len([part for part in value.split(",") if part.strip()])
        fact = f"{name}={value!r}: this process sees {num_gpus}{of_host} GPUs"
        if num_named > num_gpus:
            fix = (
                f"it names {num_named}, but the first that does not exist hides all after it; name only GPUs that exist"
            )
            yield Finding("visible GPUs", "hurts", fact, fix)
        elif not num_gpus:
            yield Finding("visible GPUs", "note", fact, f"unset {name} to train on them")
        else:
            yield Finding("visible GPUs", "good", fact)
    if not inventory.visible and on_host is not None and num_gpus < on_host and inventory.runtime is not None:
        fix = "the driver and torch's build do not fit, or a container hides some: nvidia-smi, docker run --gpus all"
        yield Finding("visible GPUs", "hurts", f"this process sees {num_gpus} of {on_host} GPUs", fix)
    elif not inventory.visible and on_host and inventory.runtime is None:
        fix = "pip install torch from an index with CUDA builds"
        yield Finding("visible GPUs", "hurts", f"{on_host} GPUs, but torch is built without CUDA", fix)


def _judge_links(inventory: DeviceInventory) -> Iterator[Finding]:
    names = {gpu.name for gpu in inventory.gpus}
    if len(names) > 1:
        kinds = ", ".join(f"cuda:{index} {gpu.name}" for index, gpu in enumerate(inventory.gpus))
        fix = "synchronous ranks wait for the slowest; choose equal ones with CUDA_VISIBLE_DEVICES"
        yield Finding("GPU kinds", "hurts", f"they differ: {kinds}", fix)
    for index, lanes in enumerate(inventory.lanes):
        if lanes is not None and lanes.used < lanes.possible:
            fact = f"cuda:{index} uses {lanes.used} of {lanes.possible} PCIe lanes"
            yield Finding(
                "GPU link", "hurts", fact, "batches arrive more slowly; try another slot, or ask the host's owner"
            )
    if inventory.without_peer_access:
        pairs = ", ".join(f"cuda:{first} and cuda:{second}" for first, second in inventory.without_peer_access)
        fix = "what they exchange passes through host memory; see nvidia-smi topo -m"
        yield Finding("GPU peers", "hurts", f"no direct access between {pairs}", fix)
    elif len(inventory.gpus) > 1:
        yield Finding("GPU peers", "good", "every GPU accesses the memory of every other")


def _judge_ranks(ranks: int, num_gpus: int) -> Finding:
    together = "train all ranks in one process on one GPU (device='cuda' without a launcher, or train --local)"
    if ranks > num_gpus:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        fact = f"{ranks} ranks, but {gpus}: processes of a host need a GPU each"
        return Finding("GPU ranks", "hurts", fact, f"use at most {num_gpus}, or {together}")
    return Finding("GPU ranks", "good", f"{ranks} ranks and {num_gpus} GPUs: each process takes one")


def check_cores(ranks: int) -> Iterator[Finding]:
    """Check the number of cores against ranks and threads."""
    cores, default_threads = this_host().num_usable, place_on_this_host(ranks).ranks[0].threads
    threads = requested_threads() or default_threads
    fact = f"{ranks} ranks x {threads} threads on {cores} cores"
    if ranks * threads > cores:
        fix = "use fewer ranks" if ranks > cores else f"set {THREADS_VARIABLE}={cores // ranks}, or unset it"
        yield Finding("cores", "hurts", f"{fact}: they share cores", fix)
    else:
        yield Finding("cores", "good", fact)


def check_topology(ranks: int) -> Iterator[Finding]:
    """Show what the cores share, and to which cores ranks would be bound."""
    yield Finding("topology", "good", str(this_host()))
    bindings: tuple[Binding, ...] = ("core", "numa")
    for bind in bindings:
        placements = place_on_this_host(ranks, bind=bind).ranks[:RANKS_SHOWN]
        cpus = [
            f"rank {rank} on {','.join(map(str, placement.cpus)) or 'any'}" for rank, placement in enumerate(placements)
        ]
        rest = [f"{ranks - RANKS_SHOWN} more"] if ranks > RANKS_SHOWN else []
        yield Finding(
            "binding", "good", f"{DEFAULT_BINDING} by default; with --bind {bind}: {'; '.join([*cpus, *rest])}"
        )


def check_memory(ranks: int) -> Iterator[Finding]:
    """Check free memory and the shared-memory file system."""
    available = _meminfo().get("MemAvailable")
    if available is not None:
        gib = available / 2**30
        grade: Grade = "hurts" if gib < ranks else "good"
        yield Finding(
            "memory", grade, f"{gib:.1f} GiB free", "end other programs, or use fewer ranks" if grade == "hurts" else ""
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / 2**20
        small = free < 256
        fix = "start the container with --shm-size=1g" if small else ""
        yield Finding("/dev/shm", "hurts" if small else "good", f"{free:,.0f} MiB free", fix)


def check_allocator(_ranks: int) -> Iterator[Finding]:
    """Show what training changes in this machine's memory allocator."""
    from counterpoint.runtime.malloc import RETAIN_FREED, heap_of_process

    variables = allocator_variables()
    if heap_of_process() is None:
        yield Finding("allocator", "good", "the C library is not glibc: training leaves its allocator unchanged")
    elif variables:
        yield Finding("allocator", "good", f"set up by {', '.join(variables)}: training leaves it unchanged")
    else:
        values = ", ".join(f"{name}={value}" for name, value in RETAIN_FREED.items())
        yield Finding(
            "allocator", "note", f"training makes glibc retain the memory that steps free ({values}) until it ends",
            f"to leave it unchanged, pass retain_freed_memory=False or set {ALLOCATOR_VARIABLES[0]}",
        )  # fmt: skip


def check_network(_ranks: int) -> Iterator[Finding]:
    """Check the loopback interface and this machine's name."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("loopback", "good", "a port on 127.0.0.1 can be bound")
    except OSError as error:
        yield Finding("loopback", "broken", f"no port on 127.0.0.1 can be bound: {error}", "bring the interface lo up")
    name, began = socket.gethostname(), time.perf_counter()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding("host name", "note", f"{name} has no address", "only runs over several hosts need one")
        return
    seconds = time.perf_counter() - began
    slow = seconds > 1.0
    fix = f"add {name} to /etc/hosts" if slow else ""
    yield Finding(
        "host name", "hurts" if slow else "good", f"{name} is {address}, found in {seconds * 1e3:.0f} ms", fix
    )


def check_folder(_ranks: int) -> Iterator[Finding]:
    """Check the folder that runs are written to."""
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here):
            free = shutil.disk_usage(here).free / 2**30
        grade: Grade = "hurts" if free < 1 else "good"
        yield Finding("run folder", grade, f"{here} can be written, {free:.1f} GiB free")
    except OSError as error:
        yield Finding("run folder", "hurts", f"{here} cannot be written: {error}", "give --folder to train")


def check_data(_ranks: int) -> Iterator[Finding]:
    """Check what the built-in jobs need."""
    if importlib.util.find_spec("sklearn") is None:
        yield Finding(
            "digits", "note", "scikit-learn is not installed", "pip install 'counterpoint[data]' for that job"
        )
    else:
        yield Finding("digits", "good", "scikit-learn is installed")


CHECKS: tuple[Callable[[int], Iterator[Finding]], ...] = (
    check_python,
    check_torch,
    check_devices,
    check_build,  # after the devices: it looks at GPUs that this process already uses
    check_cores,
    check_topology,
    check_memory,
    check_allocator,
    check_network,
    check_folder,
    check_data,
)


def _meminfo() -> dict[str, int]:
    """Return the kernel's memory statistics in bytes; empty if there are none."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return {}
    lines = (line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(rest.split()[0]) * 1024 for name, rest in lines}
