"""Real processes joined by gloo end where one process ends; one start of the processes runs all plans."""

import pytest
import torch

import counterpoint as cp
from tests.process import rank_functions as ranks
from tests.process.forked_ranks import run_forked
from tests.training.trainers import dataset, fit, max_difference

pytestmark = pytest.mark.process
ROWS = {
    2: [("data(2)", 2), ("zero(2, level=1)", 2), ("zero(2, level=2)", 2), ("zero(2, level=3)", 2),
        ("pipeline(2, schedule=gpipe)", 4), ("pipeline(2)", 4), ("tensor(2)", 4), ("server(1)", 4),
        ("data_parallel(2)", 2)],
    3: [("data(3)", 2), ("zero(3, level=1)", 1), ("zero(3, level=2)", 2), ("zero(3, level=3)", 2), ("pipeline(3)", 4),
        ("pipeline(3, schedule=gpipe)", 4), ("pipeline(2, replicas=(2,1))", 4), ("pipeline(2, replicas=(1,2))", 4),
        ("server(2)", 2), ("server(1, servers=2)", 4), ("data(2) * server(1)", 2), ("pipeline(2) * server(1)", 2),
        ("s_caffe(3)", 2)],
}  # fmt: skip


SERVED = {2: [], 3: ["asp(2)", "asp(1, servers=2)", "ssp(2, staleness=0)", "easgd(2, alpha=0.5, tau=2)"]}
PERIODS = [("data(2, sync_every=3)", 2), ("data(2, staleness=1)", 2)]
SAVED = {2: [*(ROWS[2][index] for index in (3, 5)), *PERIODS], 3: [ROWS[3][8], ROWS[3][-1]]}


def train_plan(plan):
    """What a plan computes with all ranks in this process: parameters, losses and metric."""
    params, history = fit(plan, epochs=2, fit_options={"eval_dataset": dataset(7)})
    return [params, history.losses, history.evaluations[-1].metrics["loss"]]


@pytest.fixture(scope="module")
def expected():
    """What solo computes: its parameters, losses and metric."""
    torch.set_num_threads(1)
    return train_plan("solo")


@pytest.fixture(scope="module", params=[2, 3])
def came(request, expected, tmp_path_factory):
    """The number of ranks, and what each of them has found."""
    num_ranks = request.param
    folder = str(tmp_path_factory.mktemp("saved"))
    periods = [[row, train_plan(cp.Plan.parse(row[0], num_microbatches=row[1]))] for row in PERIODS if num_ranks == 2]
    arguments = [ROWS[num_ranks], expected, folder, SERVED[num_ranks], SAVED[num_ranks], periods]
    return num_ranks, run_forked(ranks.train, ranks=num_ranks, args=arguments)


@pytest.mark.long
def test_every_strategy_trains_and_measures_as_solo_does(came):
    num_ranks, result = came
    assert len(result) == num_ranks
    for one in result:
        assert [row for row, offs in zip(ROWS[num_ranks], one["compared"], strict=True) if not max(offs) <= 1e-12] == []


@pytest.mark.long(quick=["2"])
def test_plans_that_skip_or_delay_sums_come_to_what_they_do_in_one_process(came):
    """There, they equal their sequential references."""
    num_ranks, result = came
    offs = [max(one) for rank in result for one in rank["periods"]]
    assert len(offs) == (2 * num_ranks if num_ranks == 2 else 0)
    assert max(offs, default=0.0) <= 1e-12


@pytest.mark.long(quick=["2"])
def test_a_run_continues_bit_for_bit_from_what_every_rank_has_saved(came):
    """And it has come further than where it was saved."""
    num_ranks, result = came
    assert [one["saved"] for one in result] == [[[True, False]] * len(SAVED[num_ranks])] * num_ranks


@pytest.mark.long(quick=["2"])
def test_an_asynchronous_server_learns_and_gives_every_rank_its_weights(came):
    """With one worker nothing can be stale, so that it equals solo; with two, the order in which they come is open."""
    num_ranks, (first, *others) = came
    assert len(first["served"]) == len(SERVED[num_ranks])
    for at, (begin, end, params) in enumerate(first["served"]):
        assert end < begin
        assert all(max_difference(other["served"][at][2], params) == 0 for other in others)
    if num_ranks == 3:
        assert max_difference(first["served"][1][2], fit("solo", data=dataset(48), epochs=8)[0]) <= 1e-12
