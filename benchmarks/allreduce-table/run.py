"""The table of all-reduces: as printed in the seed document, as exact formulas, and as counted."""

import torch

from counterpoint.fabric import LocalWorld
from counterpoint.fabric.collectives import ALGORITHMS, ChunkLayout, count_traffic, execute, rank_schedule
from counterpoint.fabric.collectives.execute import num_steps
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

RANKS = range(2, 18)
TABLE_LENGTH = 1_000_000  # elements of one byte, as shown in the table
LENGTHS = (0, 1, 7, 16, 1000, TABLE_LENGTH, 1_000_003)
EXECUTED_LENGTH = 1003  # elements sent between ranks in this process


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    torch.set_num_threads(1)
    rows, missed, figures = [], [], {}
    all_ranks, lengths = (range(2, 4), LENGTHS[:4]) if options.is_quick else (RANKS, LENGTHS)
    for name, algorithm in ALGORITHMS.items():
        options.report_progress(name)
        rows += heading_rows(name, algorithm)
        for num_ranks in all_ranks:
            for length in lengths:
                expected, counted = (
                    formula_counts(algorithm, num_ranks, length),
                    count_schedule(algorithm, num_ranks, length),
                )
                missed += find_differences(f"{name}, K = {num_ranks}, {length} elements", expected, counted)
                figures[f"{name} / {num_ranks} ranks / {length} elements"] = counted
            expected, done = (
                formula_counts(algorithm, num_ranks, EXECUTED_LENGTH),
                count_execution(algorithm, num_ranks),
            )
            missed += find_differences(f"{name}, K = {num_ranks}, as executed", expected, done)
            rows.append(
                ("", f"counted, K = {num_ranks}", *format_counts(count_schedule(algorithm, num_ranks, TABLE_LENGTH)))
            )
    return BenchmarkResult(
        columns=("implementation", "", "amount of communication per node", "messages per node", "communication freq."),
        rows=tuple(rows),
        missed=tuple(missed),
        figures=figures,
        notes={
            "n": f"is {TABLE_LENGTH:,} bytes where counted; minimum - maximum over the ranks, all compared",
            "=": "most likely replaces a lost fraction bar; this is consistent for the ring only, per step",
            "P": "is the largest power of two up to K, [E] is 1 where P < K and 0 elsewhere, b, s, R, C as given",
        },
    )


def heading_rows(name, algorithm):
    if algorithm.printed is not None:
        amount, frequency = algorithm.printed
        yield name, "as printed in 002", amount, "", frequency
    yield "" if algorithm.printed else name, "exact", algorithm.elements, algorithm.messages, algorithm.steps


def formula_counts(algorithm, num_ranks, length):
    cost = algorithm.cost(num_ranks, ChunkLayout(length))
    return {"steps": cost.steps, "messages": list(cost.messages), "bytes": list(cost.elements)}


def count_schedule(algorithm, num_ranks, length):
    schedule, group = algorithm.schedule(num_ranks), algorithm.group(num_ranks)
    counts = count_traffic(schedule, ChunkLayout(length), group=group)
    return {
        "steps": num_steps(schedule, group),
        "messages": [counts[rank].num_messages for rank in range(num_ranks)],
        "bytes": [counts[rank].sent_bytes for rank in range(num_ranks)],
    }


def count_execution(algorithm, num_ranks):
    """Return the counts of ranks in this process while they execute the schedule."""
    schedule, group = algorithm.schedule(num_ranks), algorithm.group(num_ranks)

    def work(fabric):
        tensors = [torch.ones(EXECUTED_LENGTH, dtype=torch.uint8) for rank in group if rank == fabric.rank]
        counts = execute(fabric, rank_schedule(schedule, group, fabric.rank), "ones", tensors)
        assert all(bool((tensor == len(group)).all()) for tensor in tensors)
        return counts

    with LocalWorld(num_ranks) as world:
        counts = world.run(work)
    expected = count_traffic(schedule, ChunkLayout(EXECUTED_LENGTH), group=group)
    same = all(counts[rank] == expected[rank] for rank in range(num_ranks))
    return {
        "steps": num_steps(schedule, group) if same else "differs from the schedule",
        "messages": [one.num_messages for one in counts],
        "bytes": [one.sent_bytes for one in counts],
    }


def find_differences(what, expected, counted):
    for unit, expected_count in expected.items():
        if counted[unit] != expected_count:
            yield f"{what}: {unit} are {counted[unit]}, the formula gives {expected_count}"


def format_counts(counted):
    return format_range(counted["bytes"]), format_range(counted["messages"]), str(counted["steps"])


def format_range(values):
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} - {most:,}"
