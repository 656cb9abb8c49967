"""Mistakes that raise no error by themselves: each is reported as documented, within two seconds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F

from counterpoint.training.distributed_world import RankThreads, recommend_threads
from counterpoint.world.topology import Core, Topology
from tests.mistakes import silent_mistakes
from tests.mistakes.documented import documented_messages
from tests.mistakes.rank_processes import run_on_ranks
from tests.process.test_faults import variables
from tests.training.trainers import dataset, mlp

pytestmark = [pytest.mark.process, pytest.mark.serial]  # two seconds, where nothing else runs

CORES = Topology((Core((0, 2)), Core((1, 3))))


def collect_answers(script):
    """Return the answers, seconds and warnings of all ranks; scripts after which ranks continue run in one start."""
    scripts = silent_mistakes.CONTINUING_SCRIPTS if script in silent_mistakes.CONTINUING_SCRIPTS else (script,)
    result = run_on_ranks(scripts, silent_mistakes.NUM_RANKS)
    answers, seconds, caught_warnings = zip(*(one[script.__name__] for one in result), strict=True)
    return list(answers), max(seconds), list(caught_warnings)


def masked(text):
    """The text without numbers that are others on every machine."""
    return re.sub(r"pid \d+|\d+ threads?", "N", text)


def test_workers_forked_with_threads_cause_one_warning_on_each_rank():
    """Not in every epoch, though each starts other workers."""
    _, _, caught_warnings = collect_answers(silent_mistakes.workers_that_are_forked_late)
    assert [[masked(text) for text in texts] for texts in caught_warnings] == [
        [masked(text) for text in documented_messages("Forked workers")]
    ] * silent_mistakes.NUM_RANKS


def test_noise_that_depends_on_the_number_of_ranks_causes_a_warning():
    _, seconds, caught_warnings = collect_answers(silent_mistakes.noise_for_many_samples_at_once)
    assert (
        caught_warnings
        == [documented_messages("Noise that depends on the number of ranks")] * silent_mistakes.NUM_RANKS
    )
    assert seconds < 2


def test_an_optimizer_of_another_model_is_refused_on_all_ranks():
    answers, seconds, _ = collect_answers(silent_mistakes.an_optimizer_from_before)
    assert answers == documented_messages("An optimizer that was built too early") * silent_mistakes.NUM_RANKS
    assert seconds < 2


def test_samples_that_all_horovod_ranks_get_cause_one_warning():
    _, seconds, caught_warnings = collect_answers(silent_mistakes.the_same_samples_under_horovod)
    assert caught_warnings == [documented_messages("The same samples under Horovod"), []]
    assert seconds < 2


def test_replicas_that_differ_are_reported_in_the_next_step_on_all_ranks():
    answers, seconds, _ = collect_answers(silent_mistakes.weights_changed_unseen)
    assert answers == documented_messages("Replicas that differ")[:1] * silent_mistakes.NUM_RANKS
    assert seconds < 2


def test_the_optimizers_state_is_refused_where_other_processes_have_it():
    answers, seconds, _ = collect_answers(silent_mistakes.optimizer_state_read_in_a_loop)
    assert answers == documented_messages("The optimizer's state read in a loop") * silent_mistakes.NUM_RANKS
    assert seconds < 2


def test_weights_that_one_rank_changes_between_steps_end_the_run_on_all():
    answers, seconds, _ = collect_answers(silent_mistakes.weights_changed_in_place)
    expected_message = documented_messages("Weights changed in a loop")[0]
    assert answers[1] == expected_message
    of_the_other = f"stopped because of rank 1: {expected_message}"
    assert of_the_other in answers[0] or answers[0] == documented_messages("Weights changed in a loop")[2]
    assert seconds < 2


def test_weights_that_all_ranks_of_a_host_change_in_their_one_copy_are_refused():
    answers, seconds, _ = collect_answers(silent_mistakes.weights_changed_through_data)
    text = documented_messages("Weights changed in a loop")[2]
    assert any(text in answer for answer in answers)
    assert all(answer.startswith(("DataError: ", "PeerError: ")) for answer in answers)
    assert seconds < 2


def test_weights_that_all_ranks_change_in_copies_of_their_own_are_trained_as_in_a_plain_loop():
    answers, _, _ = collect_answers(silent_mistakes.own_weights_changed_through_data)
    model = mlp()
    optimizer = silent_mistakes.SGD(model.parameters())
    inputs, targets = dataset(12).tensors
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    model[2].weight.data.mul_(0.9)
    assert answers == [pytest.approx(F.cross_entropy(model(inputs), targets).item(), rel=1e-12)] * 2


@pytest.mark.parametrize(
    "run", [silent_mistakes.weights_given_other_memory, silent_mistakes.exported_weights_given_other_memory]
)
def test_weights_that_all_ranks_give_other_memory_are_refused(run):
    """Where a host's ranks share one copy, they went on to update the old memory, and computed with the new values."""
    answers, seconds, _ = collect_answers(run)
    text = documented_messages("Weights changed in a loop")[1]
    assert any(text in answer for answer in answers)
    assert all(answer.startswith(("DataError: ", "PeerError: ")) for answer in answers)
    assert seconds < 2


def test_ranks_with_more_threads_than_cores_have_fewer_now():
    (first, second), _, _ = collect_answers(silent_mistakes.more_threads_than_cores)
    assert re.match(r"counterpoint: 2 ranks x \d+ threads on \d+ cores?; setting \d+ threads? each ", first[0])
    assert second == ("", first[1])
    assert first[1] == int(re.search(r"setting (\d+)", first[0])[1])  # type: ignore[index]


@pytest.mark.parametrize(
    ("threads", "is_wanted", "num_ranks", "expected"),
    [(1, False, 2, 1), (2, False, 2, 1), (2, True, 2, 2), (1, False, 3, 1), (2, True, 3, 1)],
)
def test_threads_that_were_asked_for_stay_unless_ranks_alone_are_too_many(threads, is_wanted, num_ranks, expected):
    ranks = [RankThreads("host", (0, 1, 2, 3), threads, is_wanted)] * num_ranks
    result, note = recommend_threads(ranks, CORES, num_cpus=4)
    assert result == expected
    assert bool(note) is (threads * num_ranks > 2)


def test_the_notice_of_threads_is_that_of_the_page():
    notes = [
        recommend_threads([RankThreads("host", (0, 1, 2, 3), 2, is_requested=False)] * count, CORES, num_cpus=4)[1]
        for count in (2, 4)
    ]
    bound = recommend_threads(
        [RankThreads("host", (0,), 1, is_requested=False)] * 2, Topology((Core((0,)),)), num_cpus=4
    )[1]
    assert [*notes, bound] == documented_messages("More threads than cores")


STARTED = """
import os, sys, torch
os.environ.pop("OMP_NUM_THREADS")  # torchrun sets it; mpirun and srun do not
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
from tests.mistakes.silent_mistakes import step_of
with step_of():
    sys.stdout.write(f"{torch.get_num_threads()} threads\\n")
"""


@pytest.mark.slow
def test_ranks_of_another_launcher_have_fewer_threads_too(tmp_path):
    (tmp_path / "script.py").write_text(STARTED)
    torchrun = Path(sys.executable).with_name("torchrun")
    result = subprocess.run(
        [torchrun, "--nproc-per-node", "2", tmp_path / "script.py"],
        env=variables(), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    notes = [line for line in result.stderr.splitlines() if line.startswith("counterpoint: 2 ranks x ")]
    assert len(notes) == 1
    assert result.stdout.split() == [re.search(r"setting (\d+)", notes[0])[1], "threads"] * 2  # type: ignore[index]
