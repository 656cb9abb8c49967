from counterpoint.ps.coordinator_state import TaskQueue
from counterpoint.ps.job_config import DataConfig, RetryPolicy
from counterpoint.ps.messages import DataTask


def queue(*, slices=4, epochs=1, step=0, retry_policy=None):
    return TaskQueue(DataConfig(slices, epochs, 1, step), retry_policy or RetryPolicy())


def test_every_slice_of_every_epoch_is_given_once():
    tasks = queue(epochs=2)
    given = []
    while (task := tasks.assign("worker")) is not None:
        given.append((task.epoch, task.start))
        tasks.finish(task, "done", 1, "")
    assert given == [(epoch, start) for epoch in range(2) for start in range(4)]
    assert tasks.is_finished


def test_what_the_dead_had_is_given_again_first_as_another_attempt():
    tasks = queue()
    tasks.assign("dead"), tasks.assign("alive")
    tasks.reclaim("dead")
    assert tasks.assign("alive") == DataTask(0, 0, 1, attempt=1)


def test_who_had_a_task_before_may_still_say_that_it_is_done():
    tasks = queue()
    task = tasks.assign("slow")
    tasks.finish(task, "preempted", 0, "")
    tasks.finish(task, "done", 5, "")
    assert tasks.done[0, 0].version == 5
    assert tasks.next_task() == DataTask(0, 1, 2)


def test_a_task_that_is_done_stays_done():
    tasks = queue()
    first = tasks.assign("first")
    tasks.finish(first, "done", 3, "")
    tasks.finish(first, "failed", 0, "late")
    assert tasks.failures == {}
    assert tasks.done[0, 0].version == 3


def test_failures_and_preemptions_have_budgets_of_their_own():
    tasks = queue(slices=1, retry_policy=RetryPolicy(max_failures=1, max_preemptions=5))
    for _ in range(5):
        tasks.finish(tasks.assign("worker"), "preempted", 0, "")
    tasks.finish(tasks.assign("worker"), "failed", 0, "no such file")
    assert not tasks.stop_reason
    tasks.finish(tasks.assign("worker"), "failed", 0, "no such file")
    assert (
        "slices 0 to 1 of epoch 0 were failed 2 times, more than the 1 of the retry policy: no such file"
        in tasks.stop_reason
    )
    assert tasks.todo


def test_the_next_step_is_given_when_the_one_before_is_done():
    tasks = queue(step=2)
    first, second = tasks.assign("one"), tasks.assign("other")
    assert tasks.next_task() == "later"
    tasks.finish(first, "done", 1, "")
    assert tasks.next_task() == "later"
    tasks.finish(second, "done", 1, "")
    assert tasks.next_task() == DataTask(0, 2, 3)


def test_a_draining_queue_gives_only_what_was_begun():
    tasks = queue()
    tasks.finish(tasks.assign("worker"), "preempted", 0, "")
    assert tasks.next_task(retries_only=True) == DataTask(0, 0, 1, attempt=1)
    tasks.finish(tasks.assign("worker"), "done", 1, "")
    assert tasks.next_task(retries_only=True) == "later"
    assert tasks.is_quiesced
