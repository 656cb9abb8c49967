"""Tasks of a barrier stage, simulated by threads: each starts a rank as a process, and all learn of every exit."""

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
        self.barrier, self.messages = threading.Barrier(count, timeout=60), [""] * count

    def gather(self, rank, message):
        self.messages[rank] = message
        self.barrier.wait()
        result = list(self.messages)
        self.barrier.wait()
        return result


class FakeTaskContext:
    """What Spark tells one task."""

    def __init__(self, stage, rank):
        self.stage, self.rank = stage, rank

    def partitionId(self):  # noqa: N802 - Spark's name
        return self.rank

    def getTaskInfos(self):  # noqa: N802
        return [SimpleNamespace(address=f"127.0.0.1:{port}") for port in range(len(self.stage.messages))]

    def allGather(self, message=""):  # noqa: N802
        return self.stage.gather(self.rank, message)


def run_tasks(rank_spec, count, prepare=lambda folder: None):
    """What all tasks tell the driver."""
    stage = FakeBarrierStage(count)
    with ThreadPoolExecutor(count) as pool:
        contexts = [FakeTaskContext(stage, rank) for rank in range(count)]
        return list(pool.map(lambda context: run_task(context, rank_spec, prepare), contexts))


def run_and_parse(rank_spec, count):
    return parse_results(map(to_row, run_tasks(rank_spec, count)))


@pytest.mark.long
def test_ranks_know_their_number_and_share_a_secret_key():
    rank_spec = make_rank_spec(ranked.describe_rank, ["hi"], 2, 1)
    result = run_and_parse(rank_spec, 2)
    results = [(one["rank"], one["world"], one["word"], one["is_shown"]) for one in result]
    assert results == [(0, 2, "hi", False), (1, 2, "hi", False)]
    assert torch.equal(result[0]["key"], result[1]["key"])
    assert bytes(result[0]["key"].tolist()) == rank_spec.key
    assert rank_spec.key.hex() not in repr(rank_spec)
    assert repr(rank_spec.key) not in repr(rank_spec)


@pytest.mark.long
def test_the_error_of_one_rank_ends_all_and_is_reported_with_its_traceback():
    with pytest.raises(LaunchError, match="rank 1 failed: ValueError: the cat sat") as caught:
        run_and_parse(make_rank_spec(ranked.raise_on_rank, [1], 2, 1), 2)
    assert "rank 0 stopped because of rank 1" in str(caught.value)
    assert 'raise ValueError("the cat sat on the keyboard")' in str(caught.value)


@pytest.mark.long
def test_a_rank_that_is_killed_ends_all():
    with pytest.raises(LaunchError, match="rank 0 was killed by SIGKILL"):
        run_and_parse(make_rank_spec(ranked.kill_rank, [0], 2, 1), 2)


def test_unusable_samples_are_reported_before_any_rank_starts():
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
