"""Tasks of a barrier stage, played by threads: each starts a rank as a process, and all hear of every end."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from counterpoint import DataError, LaunchError
from counterpoint.launchers.spark import SparkRankSpec, run_task
from counterpoint.spark.ranks import make_rank_spec, parse_results, to_row
from tests.spark import rank_functions as ranked

pytestmark = pytest.mark.process


class FakeBarrierStage:
    """What tasks of one stage say to each other."""

    def __init__(self, count):
        self.barrier, self.said = threading.Barrier(count, timeout=60), [""] * count

    def gather(self, rank, message):
        self.said[rank] = message
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found


class FakeTaskContext:
    """What Spark tells one task."""

    def __init__(self, stage, rank):
        self.stage, self.rank = stage, rank

    def partitionId(self):  # noqa: N802 - Spark's name
        return self.rank

    def getTaskInfos(self):  # noqa: N802
        return [SimpleNamespace(address=f"127.0.0.1:{port}") for port in range(len(self.stage.said))]

    def allGather(self, message=""):  # noqa: N802
        return self.stage.gather(self.rank, message)


def run_tasks(order, count, prepare=lambda folder: None):
    """What all tasks tell the driver."""
    stage = FakeBarrierStage(count)
    with ThreadPoolExecutor(count) as pool:
        contexts = [FakeTaskContext(stage, rank) for rank in range(count)]
        return list(pool.map(lambda context: run_task(context, order, prepare), contexts))


def run_and_parse(order, count):
    return parse_results(map(to_row, run_tasks(order, count)))


def test_ranks_know_their_place_and_share_a_key_that_nobody_sees():
    order = make_rank_spec(ranked.describe_rank, ["hi"], 2, 1)
    found = run_and_parse(order, 2)
    results = [(one["rank"], one["world"], one["word"], one["is_shown"]) for one in found]
    assert results == [(0, 2, "hi", False), (1, 2, "hi", False)]
    assert torch.equal(found[0]["key"], found[1]["key"])
    assert bytes(found[0]["key"].tolist()) == order.key
    assert order.key.hex() not in repr(order)
    assert repr(order.key) not in repr(order)


def test_the_error_of_one_rank_ends_all_and_is_told_with_its_traceback():
    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: the cat sat") as caught:
        run_and_parse(make_rank_spec(ranked.raise_on_rank, [1], 2, 1), 2)
    assert "rank 0 stopped because of rank 1" in str(caught.value)
    assert 'raise ValueError("the cat sat on the keyboard")' in str(caught.value)


def test_a_rank_that_is_killed_ends_all():
    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL"):
        run_and_parse(make_rank_spec(ranked.kill_rank, [0], 2, 1), 2)


def test_samples_that_cannot_be_used_are_told_before_any_rank_starts():
    def prepare(folder):
        raise DataError("row 3 has nothing (null) in column label")

    results = run_tasks(SparkRankSpec(("never",), "", (), b"", "job", 2), 2, prepare)
    assert {one.report for one in results} == {"rank 0 could not start: row 3 has nothing (null) in column label"}


def test_another_number_of_tasks_than_ranks_is_refused():
    results = run_tasks(SparkRankSpec(("never",), "", (), b"", "job", 3), 2)
    assert "Spark made 2 tasks of 3 partitions" in results[1].report


def test_a_function_that_no_other_process_finds_is_refused():
    with pytest.raises(LaunchError, match="cannot be imported by another process"):
        make_rank_spec(lambda: None, [], 2, 1)
