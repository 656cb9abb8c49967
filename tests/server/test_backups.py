"""Slow portions: when nothing else is left, somebody else does them, too, and the first to be done counts."""

from counterpoint.server.job import Bsp, Budget
from tests.server.working.crews import Crew, distance, mlp, numbers, portions_of, solo


def crew_of_two(backup_after):
    crew = Crew(portions_of(numbers(), Bsp(4)), budget=Budget(backup_after=backup_after))
    for name in ("slow", "fast"):
        crew.join(name, mlp())
    crew.take_turns(1)
    slow = crew.turns.pop("slow")
    crew.take_turns(6)
    return crew, slow


def test_a_portion_that_lasts_is_given_to_whoever_is_idle():
    crew, _ = crew_of_two(backup_after=3.0)
    assert sorted(crew.trained) == [0, 1, 2, 3]
    crew.job.pass_time(4.0)
    crew.take_turns()
    assert crew.job.coordinator.book.queue.is_finished
    assert distance(crew.model(), solo(mlp(), numbers(), crew.portions)) < 1e-12


def test_who_comes_late_has_done_no_harm():
    crew, slow = crew_of_two(backup_after=3.0)
    crew.job.pass_time(4.0)
    crew.take_turns(3)
    crew.turns["slow"] = slow
    crew.take_turns()
    assert distance(crew.model(), solo(mlp(), numbers(), crew.portions)) < 1e-12


def test_without_backups_one_waits():
    crew, _ = crew_of_two(backup_after=0.0)
    crew.job.pass_time(4.0)
    crew.take_turns(6)
    assert sorted(crew.trained) == [0, 1, 2, 3]
