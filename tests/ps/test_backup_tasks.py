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


def crew_of_two(backup_after):
    crew = InterleavedWorkers(
        make_slices(make_numeric_data(), Bsp(4)), retry_policy=RetryPolicy(backup_after=backup_after)
    )
    for name in ("slow", "fast"):
        crew.join(name, mlp())
    crew.run_rounds(1)
    slow = crew.event_streams.pop("slow")
    crew.run_rounds(6)
    return crew, slow


def test_a_slice_that_lasts_is_given_to_whoever_is_idle():
    crew, _ = crew_of_two(backup_after=3.0)
    assert sorted(crew.trained) == [0, 1, 2, 3]
    crew.job.advance(4.0)
    crew.run_rounds()
    assert crew.job.coordinator.state.tasks.is_finished
    assert max_relative_difference(crew.model(), train_single_process(mlp(), make_numeric_data(), crew.slices)) < 1e-12


def test_who_comes_late_has_done_no_harm():
    crew, slow = crew_of_two(backup_after=3.0)
    crew.job.advance(4.0)
    crew.run_rounds(3)
    crew.event_streams["slow"] = slow
    crew.run_rounds()
    assert max_relative_difference(crew.model(), train_single_process(mlp(), make_numeric_data(), crew.slices)) < 1e-12


def test_without_backups_one_waits():
    crew, _ = crew_of_two(backup_after=0.0)
    crew.job.advance(4.0)
    crew.run_rounds(6)
    assert sorted(crew.trained) == [0, 1, 2, 3]
