from counterpoint.server.calls import Task
from counterpoint.server.job import Budget, Work
from counterpoint.server.tasks import Queue


def queue(*, portions=4, epochs=1, step=0, budget=None):
    return Queue(Work(portions, epochs, 1, step), budget or Budget())


def test_every_portion_of_every_epoch_is_given_once():
    tasks = queue(epochs=2)
    given = []
    while (task := tasks.give("worker")) is not None:
        given.append((task.epoch, task.start))
        tasks.end(task, "done", 1, "")
    assert given == [(epoch, start) for epoch in range(2) for start in range(4)]
    assert tasks.is_finished


def test_what_the_dead_had_is_given_again_first_as_another_attempt():
    tasks = queue()
    tasks.give("dead"), tasks.give("alive")
    tasks.recall("dead")
    assert tasks.give("alive") == Task(0, 0, 1, attempt=1)


def test_who_had_a_task_before_may_still_say_that_it_is_done():
    tasks = queue()
    task = tasks.give("slow")
    tasks.end(task, "preempted", 0, "")
    tasks.end(task, "done", 5, "")
    assert tasks.done[0, 0].version == 5
    assert tasks.upcoming() == Task(0, 1, 2)


def test_a_task_that_is_done_stays_done():
    tasks = queue()
    first = tasks.give("first")
    tasks.end(first, "done", 3, "")
    tasks.end(first, "failed", 0, "late")
    assert tasks.failures == {}
    assert tasks.done[0, 0].version == 3


def test_failures_and_preemptions_have_budgets_of_their_own():
    tasks = queue(portions=1, budget=Budget(failures=1, preemptions=5))
    for _ in range(5):
        tasks.end(tasks.give("worker"), "preempted", 0, "")
    tasks.end(tasks.give("worker"), "failed", 0, "no such file")
    assert not tasks.stopped
    tasks.end(tasks.give("worker"), "failed", 0, "no such file")
    assert (
        "portions 0 to 1 of epoch 0 were failed 2 times, more than the 1 of the budget: no such file" in tasks.stopped
    )
    assert tasks.todo


def test_the_next_step_is_given_when_the_one_before_is_done():
    tasks = queue(step=2)
    first, second = tasks.give("one"), tasks.give("other")
    assert tasks.upcoming() == "later"
    tasks.end(first, "done", 1, "")
    assert tasks.upcoming() == "later"
    tasks.end(second, "done", 1, "")
    assert tasks.upcoming() == Task(0, 2, 3)


def test_a_draining_queue_gives_only_what_was_begun():
    tasks = queue()
    tasks.end(tasks.give("worker"), "preempted", 0, "")
    assert tasks.upcoming(begun_only=True) == Task(0, 0, 1, attempt=1)
    tasks.end(tasks.give("worker"), "done", 1, "")
    assert tasks.upcoming(begun_only=True) == "later"
    assert tasks.is_settled
