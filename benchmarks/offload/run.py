"""An update whose optimizer state is on disk compared with one in memory, and with the disk alone, alternately."""

import statistics
import tempfile
import time
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.runtime.offload.chunk_file import ChunkFile, Span, allocate_aligned
from counterpoint.simulator.cost_model import ADAM_PASSES
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, WIDTH, NUM_LAYERS, CHUNK_BYTES, MAX_RATIO = 5, 1024, 64, 32 << 20, 1.25
COPY_BYTES = 256 << 20


def start(folder, num_layers):
    """Return a step with its state in memory, or on disk in a folder."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    passes = ("overlap",) if folder is None else ("overlap", "offload:state=disk")
    return cp.parallelize(
        model,
        optim.AdamW(model.parameters()),
        F.mse_loss,
        strategy="solo",
        passes=passes,
        offload_folder=folder,
        cross_sample="accept",
    )


def update_s(step):
    """Return the seconds of the updates of a step, with what fetches and offloads their state."""
    (rank,) = step.local_ranks.ranks.values()
    interpreter = rank.interpreter
    interpreter.use_clock(time.perf_counter)
    interpreter.state.timings.clear()
    step(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
    words = ("Update", "Fetch", "Offload")
    instructions = interpreter.program.instructions
    own = [one for one in interpreter.state.timings if type(instructions[one.start]).__name__ in words]
    interpreter.use_clock(None)
    return sum(one.stop_s - one.start_s for one in own)


def disk_s(file, spans, buffers):
    """Return the seconds of reading chunks and writing them back, each when it was read."""
    writes, free = deque(), deque(buffers)
    start_s = time.perf_counter()
    reads = deque([(spans[0], buffer := free.popleft(), file.start_read(spans[0], buffer))])
    for index in range(len(spans)):
        if index + 1 < len(spans):
            if not free:
                buffer, job = writes.popleft()
                file.wait(job, "writing")
                free.append(buffer)
            reads.append((spans[index + 1], buffer := free.popleft(), file.start_read(spans[index + 1], buffer)))
        span, buffer, job = reads.popleft()
        file.wait(job, "reading")
        writes.append((buffer, file.start_write(span, buffer)))
    for _, job in writes:
        file.wait(job, "writing")
    return time.perf_counter() - start_s


def copy_bytes_per_s():
    """Return the bytes that a copy reads and writes in memory in a second."""
    source, target = torch.ones(COPY_BYTES // 4), torch.empty(COPY_BYTES // 4)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start_s)
    return 2 * COPY_BYTES / min(times)


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    num_layers = 2 if options.is_quick else NUM_LAYERS
    weight_bytes, threads = 4 * WIDTH * WIDTH * num_layers, torch.get_num_threads()
    size = min(CHUNK_BYTES, 2 * weight_bytes)
    spans = [Span(at, at * size, size) for at in range(2 * weight_bytes // size)]
    times = {"memory": [], "disk": [], "disk alone": []}
    torch.set_num_threads(1)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            start(None, num_layers) as kept,
            start(folder, num_layers) as moved,
        ):
            file = ChunkFile(folder, 0, 60.0)
            file.open(2 * weight_bytes)
            buffers = [allocate_aligned(size).zero_() for _ in range(3)]
            for span in spans:
                file.wait(file.start_write(span, buffers[0]), "writing")
            for step in (kept, moved):  # which build their ranks, and allocate
                step(torch.ones(1, WIDTH), torch.ones(1, WIDTH))
            for number in range(options.num_rounds(ROUNDS)):
                options.report_progress(f"round {number + 1}")
                times["memory"].append(update_s(kept))
                times["disk"].append(update_s(moved))
                times["disk alone"].append(disk_s(file, spans, buffers))
            file.close()
    finally:
        torch.set_num_threads(threads)
    return make_result(times, weight_bytes)


def make_result(times, weight_bytes):
    median = {name: statistics.median(found) for name, found in times.items()}
    ratio = statistics.median(one / other for one, other in zip(times["disk"], times["disk alone"], strict=True))
    limit, moved = copy_bytes_per_s(), {"memory": ADAM_PASSES * weight_bytes}
    rows = []
    for name, seconds in median.items():
        rate = moved.get(name, 4 * weight_bytes) / seconds
        best = limit if name == "memory" else 4 * weight_bytes / median["disk alone"]
        rows.append((name, f"{1e3 * seconds:.0f}", f"{rate / 1e9:.2f}", f"{rate / best:.2f}"))
    missed = (
        () if ratio <= MAX_RATIO else (f"the update takes {ratio:.2f} times the disk alone, more than {MAX_RATIO}",)
    )
    columns = ("contender", "ms per update", "GB/s", "fraction of the bandwidth")
    return BenchmarkResult(columns, tuple(rows), missed, {"seconds": times, "copy_bytes_per_s": limit})
