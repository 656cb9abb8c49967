"""Shared-memory all-reduces compared with gloo's, alternately on the same ranks."""

import json
import socket
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import run_command, script_command
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS = 5
KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, 256 * KB, MB, 8 * MB, 32 * MB, 100 * MB)
SMALL_GRADIENTS, SMALL_BYTES = 400, 4 * KB


@dataclass(frozen=True)
class CollectiveRow:
    """One row of the table: all times in seconds, by round."""

    ranks: int
    what: str
    bar: float
    shared: list
    copied: list
    gloo: list
    deepspeed: list

    @property
    def ratio(self):
        return statistics.median(g / s for g, s in zip(self.gloo, self.shared, strict=True))


def min_speedup(ranks, num_bytes):
    if ranks > 2:
        return 10.0 if num_bytes <= MB else 3.0
    if num_bytes <= 4 * KB:
        return 20.0
    if num_bytes <= 256 * KB:
        return 10.0
    return 6.0 if num_bytes <= 32 * MB else 4.0


def on_ranks(ranks, rounds, sizes):
    """Return the results of rank 0."""
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    lines = []
    command = script_command(Path(__file__).with_name("ranks.py"), list(map(str, (port, rounds, *sizes))))
    before = deepspeed_segments()
    result = run_command(command, ranks, threads_per_rank=1, on_line=lines.append)
    for left in deepspeed_segments() - before:
        left.unlink()
    found = [line.text for line in lines if line.text.startswith("{")]
    if result.exit_code or not found:
        raise LaunchError(f"the ranks of the measurement ended with {result.exit_code}: {result.report}; run it again")
    return json.loads(found[0])


def deepspeed_segments():
    """Return the shared-memory segments that DeepSpeed leaves after its processes exit."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def copy_bandwidth():
    """Return the bytes per second of a 100 MB copy on one core, counting reads and writes."""
    source, target = torch.ones(100 * MB // 4), torch.ones(100 * MB // 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return 2 * 100 * MB / statistics.median(seconds)


def make_rows(ranks, found):
    for key, seconds in found.items():
        is_small = key == "small"
        bar = 20.0 if is_small and ranks == 2 else 10.0 if is_small else min_speedup(ranks, int(key))
        what = f"{SMALL_GRADIENTS} x {SMALL_BYTES // KB} KB" if is_small else size_text(int(key))
        yield CollectiveRow(
            ranks, what, bar, seconds["shared"], seconds["copied"], seconds["gloo"], seconds.get("deepspeed", [])
        )


def size_text(num_bytes):
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


def format_time(seconds):
    return f"{1e6 * statistics.median(seconds):,.0f} us" if seconds else "-"


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    rounds, sizes = options.num_rounds(ROUNDS), SIZES[:2] if options.is_quick else SIZES
    rows, missed, figures = [], [], {}
    bandwidth = copy_bandwidth()
    for ranks in (2,) if options.is_quick else (2, 4):
        options.report_progress(f"{ranks} ranks")
        for row in make_rows(ranks, on_ranks(ranks, rounds, sizes)):
            ratios = [g / s for g, s in zip(row.gloo, row.shared, strict=True)]
            copied = statistics.median(g / s for g, s in zip(row.gloo, row.copied, strict=True))
            spread = f"{min(ratios):.0f} to {max(ratios):.0f}"
            times = (
                format_time(row.shared),
                format_time(row.copied),
                format_time(row.gloo),
                format_time(row.deepspeed),
            )
            rows.append((str(ranks), row.what, *times, f"{row.ratio:.1f}", spread, f"{copied:.1f}", f"{row.bar:.0f}"))
            figures[f"{ranks} ranks, {row.what}"] = {**asdict(row), "ratio": row.ratio, "copied_ratio": copied}
            if not row.ratio >= row.bar:
                missed.append(f"{ranks} ranks, {row.what}: {row.ratio:.1f} times gloo, at least {row.bar:.0f} required")
            missed += find_deepspeed_misses(row)
    note = {"in place:": "tensors in the fabric's own memory, like gradient buffers; copied: any other tensor"}
    largest = figures.get("2 ranks, 100 MB")
    if largest:  # each rank reads and writes half of both tensors
        moved = 2 * 2 * 100 * MB / statistics.median(largest["shared"])
        figures["memory"] = {"one_core_copy_bytes_per_s": bandwidth, "all_reduce_bytes_per_s": moved}
        note["100 MB on 2 ranks"] = (
            f"moves {moved / 1e9:.1f} GB/s in place; a copy on one core moves {bandwidth / 1e9:.1f}"
        )
    columns = ("ranks", "size", "in place", "copied", "gloo", "deepspeed", "ratio", "spread", "copied ratio", "bar")
    return BenchmarkResult(columns, tuple(rows), tuple(missed), figures, note)


def find_deepspeed_misses(row):
    """Yield the missed bars against DeepSpeed."""
    if row.deepspeed:
        ratio = statistics.median(d / c for d, c in zip(row.deepspeed, row.copied, strict=True))
        bar = 1.5 if row.what in {"32 MB", "100 MB"} else 1.0
        if not ratio >= bar:
            yield f"{row.ranks} ranks, {row.what}: {ratio:.2f} times DeepSpeed's, at least {bar} required"
