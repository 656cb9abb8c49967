"""One rank, the face itself, and what needs no other process."""

import importlib

import pytest
import torch

import counterpoint.compat.horovod.torch as hvd
from counterpoint.compat.horovod.collectives import NamedGroup, all_gather, all_reduce, reduce_scatter
from counterpoint.compat.horovod.reductions import ReductionOp, ScaledReduction
from counterpoint.compat.horovod.world import HorovodWorld, RankTopology
from counterpoint.errors import LaunchError
from counterpoint.launchers.variables import horovod_variables
from tests.fabric.run_ranks import on_local


@pytest.fixture
def alone(monkeypatch):
    """Start a world of one rank, whatever started the tests."""
    monkeypatch.delenv("RANK", raising=False)
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_script_runs_on_one_rank_without_a_launcher():
    layer = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), op=hvd.Adasum)
    hvd.broadcast_parameters(layer.state_dict())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert (hvd.size(), hvd.rank(), hvd.join(), hvd.cross_size()) == (1, 0, 0, 1)
    assert hvd.allgather_object("x") == ["x"]
    assert hvd.alltoall(torch.arange(3), [3])[1].tolist() == [3]
    assert torch.equal(hvd.reducescatter(torch.ones(2)), hvd.allreduce(torch.ones(2), op=hvd.Product))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_normalization_of_one_rank_is_torch_s(momentum):
    x, results = torch.randn(4, 3, 2), []
    for kind in (hvd.SyncBatchNorm, torch.nn.BatchNorm1d):
        layer = kind(3, momentum=momentum)
        results.append([layer(x), layer(x + 1), layer.running_mean, layer.running_var, layer.eval()(x)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def operations(fabric):
    ranks = tuple(range(fabric.num_ranks))
    world = HorovodWorld(fabric, RankTopology(ranks, (3, 3, 3), fabric.rank), 0)
    among, own = NamedGroup("x", (0, 2) if fabric.rank != 1 else (1,)), torch.arange(4.0) + fabric.rank
    handles = [
        all_reduce(world, [own.clone()], among, ScaledReduction(ReductionOp.ADASUM)),
        all_reduce(world, [own.clone()], among, ScaledReduction(ReductionOp.AVERAGE, 2.0)),
        all_gather(world, [own[: fabric.rank + 1]], among),
        reduce_scatter(world, [own], among, ScaledReduction(ReductionOp.MAX)),
    ]
    return [world.handles.finish(handle) for handle in handles]


def test_ranks_may_be_threads_of_one_process():
    (_, mean, rows, first), (own, _, _, _), (_, same, _, second) = on_local(operations, 3)
    assert torch.equal(mean, 2 * (torch.arange(4.0) + 1))
    assert torch.equal(same, mean)
    assert rows.tolist() == [0.0, 2.0, 3.0, 4.0]
    assert (first.tolist(), second.tolist()) == ([2.0, 3.0], [4.0, 5.0])
    assert own.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_every_name_of_the_face_is_there():
    assert [name for name in hvd.__all__ if getattr(hvd, name, None) is None] == []
    assert sorted(hvd.__all__) == hvd.__all__


def test_elastic_training_is_absent_with_a_reason():
    elastic = importlib.import_module("counterpoint.compat.horovod.elastic")
    assert not hasattr(elastic, "run")
    with pytest.raises(AttributeError, match=r"hvd.elastic.run is not supported: .* `torchrun --max-restarts`"):
        _ = elastic.run


@pytest.mark.parametrize(("text", "fusion_bytes"), [("", 134217728), ("0", 0), (" 1000 ", 1000)])
def test_the_fusion_threshold_is_horovod_s(text, fusion_bytes):
    assert horovod_variables({"HOROVOD_FUSION_THRESHOLD": text}).fusion_bytes == fusion_bytes


def test_a_fusion_threshold_that_is_no_number_is_refused():
    with pytest.raises(LaunchError, match="HOROVOD_FUSION_THRESHOLD='64MB' is not a number of bytes"):
        horovod_variables({"HOROVOD_FUSION_THRESHOLD": "64MB"})


def test_a_timeline_of_the_whole_run_can_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    monkeypatch.delenv("RANK", raising=False)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="loss")
    hvd.shutdown()
    assert '"name": "loss"' in (tmp_path / "timeline.json").read_text()
