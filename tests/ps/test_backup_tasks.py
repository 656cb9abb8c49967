"""Slow slices: when nothing else is left, somebody else does them, too, and the first to be done counts."""

from counterpoint.ps.consistency import Bsp
from counterpoint.ps.job_config import RetryPolicy
from tests.elastic.worker_fixtures import (
    InterleavedWorkers,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
    train_single_process,
)


def start_two_workers(backup_after):
    workers = InterleavedWorkers(
        make_slices(make_numeric_data(), Bsp(4)), retry_policy=RetryPolicy(backup_after=backup_after)
    )
    for name in ("slow", "fast"):
        workers.join(name, mlp())
    workers.run_rounds(1)
    slow = workers.event_streams.pop("slow")
    workers.run_rounds(6)
    return workers, slow


def test_a_slow_slice_is_also_assigned_to_an_idle_worker():
    workers, _ = start_two_workers(backup_after=3.0)
    assert sorted(workers.trained) == [0, 1, 2, 3]
    workers.job.advance(4.0)
    workers.run_rounds()
    assert workers.job.coordinator.state.tasks.is_finished
    assert (
        max_relative_difference(workers.model(), train_single_process(mlp(), make_numeric_data(), workers.slices))
        < 1e-12
    )


def test_who_comes_late_has_done_no_harm():
    workers, slow = start_two_workers(backup_after=3.0)
    workers.job.advance(4.0)
    workers.run_rounds(3)
    workers.event_streams["slow"] = slow
    workers.run_rounds()
    assert (
        max_relative_difference(workers.model(), train_single_process(mlp(), make_numeric_data(), workers.slices))
        < 1e-12
    )


def test_without_backups_one_waits():
    workers, _ = start_two_workers(backup_after=0.0)
    workers.job.advance(4.0)
    workers.run_rounds(6)
    assert sorted(workers.trained) == [0, 1, 2, 3]
