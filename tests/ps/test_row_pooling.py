"""Sums of rows travel where there are fewer of them than rows, and change nothing else."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from counterpoint.errors import DataError, PlanError, ProtocolError
from counterpoint.fabric.shm.native import NativeLibrary, native
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.messages import PullRequest, PushRequest
from counterpoint.ps.row_pooling import RowPooling
from counterpoint.ps.shard import replay_journal
from counterpoint.ps.storage import row_storage as room
from counterpoint.ps.update_rules import Adagrad, ConstantInit, Sgd
from tests.ps.message_examples import ORIGIN

ROWS = torch.tensor([1, 4, 5, 9, 700])
THERE = ([0, 1, 4, 3, 0, 0, 2], [0, 3, 3, 5])
"""Sums of rows: of three, of none, of two, of two."""
BACK = ([0, 2, 3, 0, 3, 2, 0], [0, 3, 4, 5, 6])
"""The same the other way round: which sums each row is in."""


def sums(members, starts):
    return RowPooling(torch.tensor(members, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32))


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def servers(request):
    return LocalJob(JobConfig("local", Asp(), num_servers=request.param), is_journaled=True)


@pytest.fixture
def session(servers):
    with servers.join("worker-0") as opened:
        for key in ("table", "other"):
            opened.init_rows(key, 1000, 2, torch.float64, Adagrad(0.5), ConstantInit(1.0))
        yield opened


def added_up(values, members, starts):
    ends = [*starts[1:], len(members)]
    return torch.stack([values[members[low:high]].sum(0) for low, high in zip(starts, ends, strict=True)])


def distance(one, other):
    return float((one - other).abs().max())


@pytest.mark.parametrize("pushed", [slice(0, 0), slice(1, 4), slice(None)])
def test_sums_of_rows_are_those_of_the_rows_that_would_have_come(session, pushed):
    rows = ROWS[pushed]
    session.push("table", torch.arange(2 * len(rows), dtype=torch.float64).view(-1, 2), rows=rows)
    result = session.pull("table", rows=ROWS, pooling=sums(*THERE)).wait().values
    expected = added_up(session.pull("table", rows=ROWS).wait().values, *THERE)
    assert distance(result, expected) < 1e-12


def test_a_push_of_sums_counts_as_the_rows_whose_gradients_they_are(session):
    values = torch.arange(8, dtype=torch.float64).view(4, 2)
    session.push("table", values, rows=ROWS, pooling=sums(*BACK))
    session.push("other", added_up(values, *BACK), rows=ROWS)
    one, other = (session.pull(key, rows=ROWS).wait().values for key in ("table", "other"))
    assert distance(one, other) < 1e-12
    assert (one != 1.0).any()


def test_sums_may_be_pulled_into_a_given_tensor(session):
    out = torch.zeros(4, 2, dtype=torch.float64)
    assert session.pull("table", rows=ROWS, pooling=sums(*THERE), out=out).wait().values is out
    assert distance(out, session.pull("table", rows=ROWS, pooling=sums(*THERE)).wait().values) == 0


def test_a_journal_with_sums_says_what_became_of_the_rows(servers, session):
    session.push("table", torch.ones(4, 2, dtype=torch.float64), rows=ROWS, pooling=sums(*BACK)).wait()
    for index in range(servers.job.num_shards):
        entries = [entry for _, entry in sorted(servers.journals[index].items())]
        held = servers.node(f"server-{index}").shard_replicas[index].shard
        assert replay_journal(servers.job, index, entries).digest() == held.digest()


def test_under_bsp_sums_of_slices_are_added_in_the_order_of_slices():
    with LocalJob(JobConfig("local", Bsp(2))).join("worker-0") as session:
        session.init_rows("table", 10, 1, torch.float64, Sgd(1.0), ConstantInit(0.0))
        value = torch.ones(1, 1, dtype=torch.float64)
        for slice_index in (1, 0):
            session.push(
                "table", value, slice_index=slice_index, rows=torch.tensor([2, 3]), pooling=sums([0, 0, 0], [0, 2])
            )
        assert session.pull("table", rows=torch.tensor([2, 3]), min_versions=1).wait().values.tolist() == [
            [-4.0],
            [-2.0],
        ]


WRONG = {
    "members of another dtype": (
        RowPooling(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)),
        "int32",
    ),
    "members that are not there": (sums([0, 2], [0, 1]), "indices outside its 2 values"),
    "members below 0": (sums([-1, 0], [0, 1]), "indices outside its 2 values"),
    "members without a sum": (sums([0, 1], []), "0 pooled outputs of table|indices outside"),
    "sums that begin behind 0": (sums([0, 1], [1, 1]), "do not ascend from 0"),
    "sums that go back": (sums([0, 1, 1], [0, 2, 1]), "do not ascend from 0|3 pooled outputs of table, expected 2"),
    "sums that begin behind the end": (sums([0, 1], [0, 3]), "do not ascend from 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lists_that_cannot_be_added_up_are_refused_on_both_sides(session, name):
    wrong, message = WRONG[name]
    rows = torch.tensor([1, 4])
    with pytest.raises(ProtocolError, match=message):
        PullRequest(ORIGIN, 0, "table", 8, 0, rows, pooling=wrong)
    with pytest.raises(ProtocolError, match=message):
        PushRequest(ORIGIN, 0, "table", -1, 0, torch.ones(2, 2), rows, pooling=wrong)
    with pytest.raises(PlanError, match=message):
        session.pull("table", rows=rows, pooling=wrong)


def test_only_rows_have_sums(session):
    session.init("weight", torch.zeros(2), Sgd(0.1))
    with pytest.raises(PlanError, match="weight is a dense key"):
        session.pull("weight", pooling=sums([0], [0]))
    with pytest.raises(ProtocolError, match="without rows"):
        PullRequest(ORIGIN, 0, "weight", 8, 0, pooling=sums([0], [0]))
    with pytest.raises(ProtocolError, match="with a codec"):
        PushRequest(ORIGIN, 0, "weight", -1, 0, torch.zeros(1, dtype=torch.uint8), None, "int8", sums([], []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lists", [BACK, None], ids=["sums", "values"])
def test_what_is_added_to_rows_is_the_same_to_the_bit_with_the_native_part_and_without(dtype, lists, monkeypatch):
    torch.manual_seed(0)
    part, values = torch.randn(9, 40, dtype=dtype), torch.randn(4 if lists else 5, 40, dtype=dtype)
    places, bags = np.array([7, 0, 3, 8, 1]), sums(*lists) if lists else None
    result = []
    for library in (native(), NativeLibrary(None, "left out")):
        monkeypatch.setattr("counterpoint.ps.storage.row_storage.native", lambda library=library: library)
        result.append(part.clone())
        room.add_rows(result[-1], places, values, bags, -0.3)
    assert torch.equal(*result)
    added = values if bags is None else added_up(values, *BACK)
    assert distance(result[0][places], part[places] - 0.3 * added) <= 1e-6


@pytest.mark.parametrize(("value", "fits"), [(1e38, False), (1e30, True), (float("nan"), False)])
def test_sums_that_are_not_finite_are_refused_before_they_change_a_row(value, fits):
    with LocalJob(JobConfig("local", Asp())).join("worker-0") as opened:
        opened.init_rows("table", 10, 2, torch.float32, Sgd(0.5), ConstantInit(1.0))
        values = torch.full((4, 2), value, dtype=torch.float32)
        rows, back = torch.tensor([3]), sums([0, 1, 2, 3], [0])
        with nullcontext() if fits else pytest.raises((DataError, PlanError), match="not finite"):
            opened.push("table", values, rows=rows, pooling=back).wait()
        (row,) = opened.pull("table", rows=rows).wait().values
        assert bool((row == 1.0).all()) is not fits
