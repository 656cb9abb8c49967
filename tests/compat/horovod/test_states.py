"""Objects travel as data, states and statistics are those of all ranks, and a rank without data follows the others."""

import pytest
import torch
from torch import nn

from tests.compat.horovod import state_scenarios as states, training_scenarios as training
from tests.compat.horovod.rank_runner import once_on_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
WORLDS = pytest.mark.parametrize(("num_ranks", "transport"), [(2, "auto"), (3, "auto"), (2, "gloo")])
WIDE = torch.float64


def ranks_of(scenario, num_ranks, transport):
    scenarios = states.SCENARIOS if transport == "auto" else states.SCENARIOS[:-1]  # the last one leaves its fabric
    return [result[scenario.__name__] for result in once_on_ranks(scenarios, num_ranks, transport)]


def wide(result):
    return torch.tensor(result[1], dtype=WIDE)


@pytest.mark.long(quick=["2-auto"])
@WORLDS
def test_objects_come_back_as_they_were(num_ranks, transport):
    for in_order, same, gathered in ranks_of(states.objects, num_ranks, transport):
        assert in_order
        assert same == [True] * 12
        assert gathered == [{"rank": rank} for rank in range(num_ranks)]


@WORLDS
def test_an_object_that_would_need_a_pickle_is_refused_by_name_on_every_rank(num_ranks, transport):
    first, *others = ranks_of(states.foreign_objects, num_ranks, transport)
    part = "DataError: the object['model'][0] is a torch.nn.modules.linear.Linear, which cannot be sent"
    assert [text.startswith(part) for text in first[:2]] == [True, True]
    assert "send numbers, text, lists" in first[0]
    assert all("of rank 0 cannot be sent" in text for other in others for text in other[:2])
    assert {result[2] for result in [first, *others]} == {5}


@WORLDS
def test_all_ranks_start_from_the_state_of_one(num_ranks, transport):
    result = ranks_of(states.states, num_ranks, transport)
    assert result.count(result[1]) == num_ranks
    assert result[0][:3] == [0.2, [0.5, 0.5], 2.0]
    assert result[0][4] is True


@WORLDS
@pytest.mark.parametrize("affine", [True, False])
def test_batches_are_normalized_as_their_union_is(num_ranks, transport, affine):
    union = torch.cat([states.samples(rank) for rank in range(num_ranks)])
    y, grad, mean, var, later, *params = states.normalize(nn.BatchNorm2d, union, affine)
    ranks = [each[0 if affine else 1] for each in ranks_of(states.normalized, num_ranks, transport)]
    for at, whole in enumerate([y, grad, mean, var, later]):
        parts = [wide(each[at]) for each in ranks]
        for own, expected in zip(parts, [whole] * num_ranks if at in {2, 3} else cut(whole, num_ranks), strict=True):
            assert torch.allclose(own, expected, rtol=1e-12, atol=1e-12)
    for at, whole in enumerate(params):  # each rank has its part of the gradient of the sum of losses
        assert torch.allclose(sum(wide(each[5 + at]) for each in ranks), whole, rtol=1e-12, atol=1e-12)


def cut(whole, num_ranks):
    return whole.split(list(states.LENGTHS[:num_ranks]))


def alone_when_uneven(size):
    """What one rank comes to that has the data of all, zeros where a rank has none, and divides by all."""
    model = training.Net()
    optimizer = training.sgd(model.parameters())
    for epoch, lengths in enumerate([[2 * rank for rank in range(size)], [3 * size - rank for rank in range(size)]]):
        for step in range(max(lengths)):
            losses = [training.loss_of(model, rank, 10 * epoch + step) for rank in range(size) if step < lengths[rank]]
            optimizer.zero_grad()
            for param in model.parameters():
                param.grad = torch.zeros_like(param) if param.requires_grad else None
            (sum(losses) / size).backward()
            optimizer.step()
    return training.values(model)


@WORLDS
def test_ranks_that_run_out_of_data_follow_the_others(num_ranks, transport):
    expected = alone_when_uneven(num_ranks)
    for last, last_again, result, total in ranks_of(states.uneven, num_ranks, transport):
        assert (last, last_again, total[1]) == (num_ranks - 1, 0, [num_ranks])
        assert result == pytest.approx(expected, rel=1e-12, abs=1e-12)


@WORLDS
def test_a_joined_rank_gives_zeros_and_counts_in_means(num_ranks, transport):
    left = num_ranks - 1.0
    first, *others = ranks_of(states.zeros_of_joined_ranks, num_ranks, transport)
    assert first == []
    for result in others:
        assert result == pytest.approx([left, left / num_ranks, 1.0, 0.0, 1.0, left, left, left])


@WORLDS
def test_rank_0_writes_a_timeline_with_a_track_for_every_tensor(num_ranks, transport):
    first, *others = ranks_of(states.written_timeline, num_ranks, transport)
    assert others == [[]] * (num_ranks - 1)
    assert first == [["loss", "weight"], ["WAIT_FOR_ALLREDUCE", "ALLREDUCE", "WAIT_FOR_BROADCAST", "BROADCAST"]]


@WORLDS
def test_a_rank_that_waits_for_long_says_for_whom(num_ranks, transport):
    (text, afterwards), *_ = ranks_of(states.stalled, num_ranks, transport)
    missing = "rank 1 is" if num_ranks == 2 else "ranks 1, 2 are"
    assert text.startswith("rank 0 has waited 0 s for allreduce of loss; ")
    assert f"{missing} not waiting for it: check what they wait for instead" in text
    assert afterwards is None


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_it_can_be_shut_down_and_begun_again(num_ranks):
    for again, is_initialized, text, included, number, total in ranks_of(states.begun_again, num_ranks, "auto"):
        assert (again, is_initialized, included, number) == (True, False, None, 2)
        assert text.startswith("PlanError: Horovod is not initialized")
        assert total[1] == [1.0]
