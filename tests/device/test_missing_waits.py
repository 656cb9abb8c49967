"""Every wait in the source is needed: without any one of them a race, an error or another result is found.

The waits are found in the source. Each is left out of what the table names for it, or the table says why it cannot be.
Those of process groups are left out in tests/fabric/process_group/test_device_streams.py, in several processes.
"""

import gc
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.checkpoint.tensor_slice import TensorSlice
from counterpoint.data.sampler import split_batch
from counterpoint.device.copy_stream import CopyStream
from counterpoint.device.event_clock import EventClock
from counterpoint.device.pending_scalars import PendingScalars
from counterpoint.fabric import LocalWorld
from counterpoint.optim.one_bit_adam import OneBitAdam
from counterpoint.plan.plan import Plan
from counterpoint.runtime.batch_norm.sync import SyncBatchNormGroups
from counterpoint.runtime.comm.bucket_plan import BucketPlan, GradSize
from counterpoint.runtime.full_state import gather_slices
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.strategies.buckets import BucketConfig
from counterpoint.testing.device_survey import batches, build, make_optimizer
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.training.batches.per_rank import PerRankBatchExchange
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.initial_values import broadcast_initial_values
from counterpoint.training.ranks.local_ranks import LocalRanks
from tests.device.left_out_calls import find_calls, left_out
from tests.fabric.process_group.test_device_streams import WAITS

pytestmark = pytest.mark.filterwarnings("ignore")
PAIR = (0, 1)
Exercise = Callable[[], Any]


@dataclass(frozen=True)
class Training:
    """Three steps of a model of the survey under a plan with passes and options, whose losses and weights are compared.

    Args:
        name: of the model.
        plan: without its passes.
        passes: of the plan.
        options: of training.
        sends_32_bits: whether all-reduces do so for 16-bit floats, as between hosts.
    """

    name: str
    plan: str
    passes: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sends_32_bits: bool = False
    make_optimizer: Callable[..., Any] | None = field(default=None, hash=False)

    def __call__(self):
        plan = replace(Plan.parse(self.plan), passes=self.passes)
        model = build(self.name).to(DEVICE.device)
        optimizer = self.make_optimizer or make_optimizer(self.name, self.plan)
        spec = OptimizerSpec(optimizer, dict(model.named_parameters()))
        options, losses = TrainingOptions(**self.options), []
        with LocalWorld(plan.num_ranks) as world:
            for fabric in world.fabrics:
                cast("Any", fabric).all_reduces_in_16_bits = lambda *_: not self.sends_32_bits
            ranks = LocalRanks(world, plan, model, F.cross_entropy, spec, options, StandInAccelerator())
            for number, batch in enumerate(itertools.islice(batches(self.name), 3)):
                source = SlicedBatch(batch, tuple(split_batch(len(batch[1]), plan.global_num_microbatches)))
                ranks.build(source.inputs(0), source.sizes[0])
                losses.append(ranks.step(number, source).loss)
            ranks.export_weights()
            DEVICE.require_no_races()
            return [*map(float, losses), *(float(value.sum()) for value in model.state_dict().values())]


def on_two_ranks(work):
    """Return what two ranks return, of which the second one runs first, until it waits for the other one."""

    def run(fabric):
        if fabric.rank == 0:
            fabric.recv(1, "go")
        else:
            fabric.send(0, "go", ())
        return work(fabric)

    with LocalWorld(2) as world:
        world.fabrics[0].use_accelerator(StandInAccelerator())
        return world.run(run)


def agree_on_buckets(fabric):
    """Let ranks whose gradients are ready in different orders agree on buckets."""
    plan = BucketPlan(fabric, PAIR, BucketConfig(8, 8), [GradSize(0, 4)] * 4, "grad0")
    plan.start_sync([0.0, 1.0, 2.0, 3.0] if fabric.rank == 0 else [3.0, 2.0, 1.0, 0.0])
    plan.finish_sync()
    return plan.assignments


def pass_a_barrier(fabric, passed):
    """Return which ranks have come to a barrier when this one has passed it."""
    passed.append(fabric.rank)
    fabric.barrier(PAIR)
    return len(passed)


def wait_for_a_while(fabric):
    """Return a sum that is waited for by polling."""
    number = torch.full((1,), 1.0 + fabric.rank)
    assert fabric.all_reduce("sum", number, PAIR).completes_within(10.0)
    return number.item()


def start_with(fabric):
    """Return the weight that a rank starts with."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0 + fabric.rank)
    broadcast_initial_values(fabric, model, "broadcast")
    return model.weight.item()


def gather_whole(fabric):
    """Return a tensor that is kept in two halves."""
    part = TensorSlice("w", torch.full((2,), 1.0 + fabric.rank), (4,), 2 * fabric.rank)
    return gather_slices([part], fabric)["w"].tolist()


def gather_sizes(fabric):
    """Return the sizes of the batches of all ranks."""
    exchange = cast("Any", SimpleNamespace(fabric=fabric))
    return PerRankBatchExchange.all_gather_ints(exchange, [fabric.rank + 1], PAIR)


def receive_stats(fabric):
    """Return a running mean, of which the second rank has no samples."""
    mean = torch.full((2,), 1.0 + fabric.rank, dtype=torch.float64)
    modules = [cast("Any", SimpleNamespace(buffers=("mean",), tensor_name="mean", path="norm"))]
    store = cast("Any", SimpleNamespace(params={}, buffers={"mean": mean}))
    groups = SyncBatchNormGroups(modules, store, fabric, {(0, fabric.rank): ((0, 0), (1, 1))})
    groups.broadcast_stats(["mean"], 0, fabric.rank, {0: 4, 1: 0})
    return store.buffers["mean"].tolist()


def refill_pinned():
    """Change pinned memory of the caller after it was copied to the device."""
    stream, source = CopyStream(StandInAccelerator()), DEVICE.empty_pinned((2,), torch.float32).fill_(1.0)
    copies = stream.start([source])
    stream.wait_for_sources()
    source.fill_(2.0)
    DEVICE.synchronize()
    copy = stream.take(copies, 0)
    return None if copy is None else copy.tolist()


def read_scalars():
    """Read scalars of a device."""
    accelerator = StandInAccelerator()
    scalars = PendingScalars(accelerator)
    for key in range(2):
        scalars.add(key, torch.full((), 1.0 + key, device=accelerator.device))
    return scalars.read()


def fail_in_a_run():
    """Let ranks fail while a collective runs, and use the device afterwards."""

    def work(fabric):
        fabric.all_reduce("grad", torch.ones(2, device=DEVICE.device), PAIR)
        fabric.barrier(PAIR)
        raise ValueError("the model is wrong")

    with pytest.raises(ValueError, match="the model is wrong"):
        on_two_ranks(work)
    DEVICE.require_no_races()


def read_clock():
    """Return whether a device takes time."""
    clock = EventClock(StandInAccelerator())
    began = clock()
    torch.ones(2, device=DEVICE.device)
    began_s, ended_s = clock.read([began, clock()])
    return ended_s > began_s


DATA = Training("mlp", "data(2, bucket=0, first_bucket=0)", ("overlap",), {"clip_norm": 0.5})
ONE_BIT = Training(
    "mlp",
    "data(2, compress=onebit, compress_from=1)",
    make_optimizer=partial(OneBitAdam, lr=0.01, freeze_step=1),
)
NARROW = {"precision": "fp32(reduce=bf16)"}
NEEDED_BY: Mapping[str, Exercise] = {
    "device/accelerator.py:HostCopy.wait synchronize[0]": DATA,
    "device/communication_stream.py:CommunicationStream.after_current wait_stream[0]": DATA,
    "device/communication_stream.py:CommunicationStream.wait_for wait_event[0]": DATA,
    "device/communication_stream.py:CommunicationStream.wait_for_all wait_stream[0]": fail_in_a_run,
    "device/copy_stream.py:CopyStream.take record_stream[0]": DATA,
    "device/copy_stream.py:CopyStream.take wait_event[0]": DATA,
    "device/copy_stream.py:CopyStream.wait_for_sources synchronize[0]": refill_pinned,
    "device/event_clock.py:EventClock.read synchronize[0]": read_clock,
    "device/pending_scalars.py:PendingScalars.read wait[0]": read_scalars,
    "fabric/cast_reductions.py:CastReduction.wait wait[0]": Training("mlp", "zero(2, level=3)", ("overlap",), NARROW),
    "fabric/cast_reductions.py:CastReduction.wait wait[1]": Training(
        "mlp", "data(4)", ("overlap",), NARROW, sends_32_bits=True
    ),
    "fabric/cast_reductions.py:CastPairReduction.wait wait[0]": Training(
        "mlp", "data(2, compress=fp16)", sends_32_bits=True
    ),
    "fabric/quantized_collectives.py:DecodingWork.wait wait[0]": Training(
        "mlp", "zero(2, level=3, quantized_weights=int8)"
    ),
    "fabric/fabric.py:Work.completes_within wait[0]": partial(on_two_ranks, wait_for_a_while),
    "fabric/fabric.py:Fabric.barrier wait[0]": lambda: on_two_ranks(partial(pass_a_barrier, passed=[])),
    "fabric/local.py:LocalFabric.wait_until wait[0]": DATA,
    "fabric/local.py:LocalFabric.gather_values wait[0]": Training("cnn", "data(2)"),
    "fabric/local.py:LocalFabric.shared_zeros wait[0]": partial(
        on_two_ranks, lambda fabric: fabric.shared_zeros("weights", 2, torch.float32, PAIR).tolist()
    ),
    "runtime/batch_norm/sync.py:ReplicaStatsGroup.all_reduce wait[0]": Training(
        "sync_batch_norm", "data(2)", options={"batch_norm": "sync"}
    ),
    "runtime/batch_norm/sync.py:PendingAllGather.wait wait[0]": Training(
        "sync_batch_norm", "data(2)", options={"batch_norm": "sync"}
    ),
    "runtime/batch_norm/sync.py:SyncBatchNormGroups.broadcast_stats wait[0]": partial(on_two_ranks, receive_stats),
    "runtime/comm/bucket_plan.py:BucketPlan.finish_sync wait[0]": partial(on_two_ranks, agree_on_buckets),
    "runtime/comm/compressed_collectives.py:_ScaledWork.wait wait[0]": Training(
        "mlp", "data(2, compress=topk)", options={"loss_scale": 8.0}
    ),
    "runtime/comm/compressed_collectives.py:_GatherReduce.wait wait[0]": Training("mlp", "data(2, compress=topk)"),
    "runtime/comm/compressed_collectives.py:_MomentumReduce.wait wait[0]": ONE_BIT,
    "runtime/comm/compressed_collectives.py:_MomentumReduce.wait wait[1]": ONE_BIT,
    "runtime/comm/compressed_collectives.py:_PowerSGDReduce.wait wait[0]": Training(
        "mlp", "data(2, compress=powersgd)"
    ),
    "runtime/comm/compressed_collectives.py:_PowerSGDReduce.wait wait[1]": Training(
        "mlp", "data(2, compress=powersgd)"
    ),
    "runtime/comm/rank_communication.py:RankCommunication.run_collectives wait[0]": Training("mlp", "zero(2, level=3)"),
    "runtime/comm/rank_communication.py:RankCommunication.wait wait[1]": DATA,
    "runtime/commit/device_commit.py:gather_rows wait[0]": DATA,
    "runtime/commit/step_commit.py:gather_reports wait[0]": DATA,
    "runtime/full_state.py:gather_slices wait[0]": partial(on_two_ranks, gather_whole),
    "runtime/interpreter.py:Interpreter.run_collectives wait[0]": DATA,
    "runtime/loss/batch_loss.py:gather_microbatches wait[0]": Training(
        "mlp", "data(2)", ("gather_outputs",), {"loss_reduction": "batch"}
    ),
    "runtime/params/flat_grads.py:CombinedWork.wait wait[0]": DATA,
    "runtime/params/sparse_grads.py:all_gather_ranges wait[0]": Training("embedding", "data(2)"),
    "runtime/state_dict.py:gather_weights wait[0]": Training("mlp", "zero(2, level=3)"),
    "runtime/state_dict.py:average_buffers wait[0]": Training("cnn", "data(2)", options={"batch_norm": "microbatch"}),
    "training/batches/per_rank.py:PerRankBatchExchange.all_gather_ints wait[0]": partial(on_two_ranks, gather_sizes),
    "training/ranks/initial_values.py:broadcast_initial_values wait[0]": partial(on_two_ranks, start_with),
}
"""For each wait what fails without it."""

PASSES_ON = "returns what another function here has waited for, whose wait is left out"
SHARED = "of memory that processes of a host share"
NOT_LEFT_OUT: Mapping[str, str] = {
    "device/cuda.py:CudaAccelerator.record_stream record_stream[0]": "on a GPU only",
    "device/cuda.py:CudaAccelerator.synchronize synchronize[0]": "on a GPU only",
    "runtime/batch_norm/deferred.py:DeferredBatchNorm.finish_gather wait[0]": PASSES_ON,
    "runtime/batch_norm/deferred.py:DeferredBatchNorm.commit wait[0]": PASSES_ON,
    "runtime/batch_norm/sync.py:ReplicaStatsGroup.gather wait[0]": PASSES_ON,
    "runtime/comm/rank_communication.py:RankCommunication.wait wait[0]": PASSES_ON,
    "runtime/comm/reducer.py:BackwardOverlap.wait wait[0]": PASSES_ON,
    "runtime/comm/reducer.py:Reducer.wait wait[0]": "measures the time of a traced step; another one follows",
    "runtime/commit/device_commit.py:PendingCommit.read wait[0]": PASSES_ON,
    "runtime/commit/device_commit.py:PendingCommit.read_unequal_output wait[0]": PASSES_ON,
    "runtime/commit/device_commit.py:PendingCommit.result_of wait[0]": PASSES_ON,
    "runtime/interpreter.py:Interpreter.read_reports wait[0]": PASSES_ON,
    "runtime/params/grad_check.py:_split_by_check wait[0]": PASSES_ON,
    "runtime/params/host_targets.py:HostTargets.load wait[0]": PASSES_ON,
    "runtime/params/host_targets.py:HostTargets.load wait[1]": PASSES_ON,
    "runtime/params/param_store.py:ParamStore.unshare wait[0]": SHARED,
    "runtime/params/shared_params.py:SparseGradExchange.read_all wait[0]": SHARED,
    "training/between_steps/rebuild_agreement.py:require_same_changes wait[0]": "finds ranks at other places",
}
"""Waits that are not left out, and why."""
OF_THE_HOST: Mapping[str, str] = {
    "compat/": "works of a fabric, in interfaces of other libraries that take tensors in host memory",
    "elastic/": "workers in processes of their own, in host memory",
    "fabric/collectives/": "gloo",
    "fabric/gloo/": "gloo and threads",
    "fabric/hosts/": "gloo and threads",
    "fabric/key_value_store.py": "sockets",
    "fabric/process_group/": "in several processes: tests/fabric/process_group/test_device_streams.py",
    "fabric/shm/": "memory that processes share",
    "fabric/torch_backend/": "works of a fabric, in the interface of torch.distributed, in host memory",
    "launchers/": "processes",
    "ps/": "threads and sockets",
    "rpc/": "threads and sockets",
    "runtime/offload/": "threads that read and write files",
    "spark/": "threads and sockets",
    "testing/": "the stand-in device itself",
}
"""Where waits are for the host only, and what they wait for."""

ALL_WAITS = {str(call): call for call in find_calls(WAITS) if not call.path.startswith(tuple(OF_THE_HOST))}


def is_found(place, exercise):
    """Return whether something fails, or gives another result, without a wait."""
    expected = exercise()
    try:
        with left_out(ALL_WAITS[place]):
            return exercise() != expected
    except Exception:  # noqa: BLE001 - values that have not arrived may be anything, and so may an error
        return True
    finally:
        gc.collect()  # what a failed run has held
        DEVICE.order.errors.clear()


@pytest.mark.long(quick=["device/communication_stream.py...", "runtime/comm/bucket_plan.py..."])
@pytest.mark.parametrize("place", NEEDED_BY)
def test_a_wait_that_is_left_out_is_found(place):
    assert is_found(place, NEEDED_BY[place])


def test_every_wait_in_the_source_is_left_out_or_has_a_reason():
    assert NEEDED_BY.keys().isdisjoint(NOT_LEFT_OUT)
    assert ALL_WAITS.keys() == NEEDED_BY.keys() | NOT_LEFT_OUT.keys()
    paths = {call.path for call in find_calls(WAITS)}
    assert [prefix for prefix in OF_THE_HOST if not any(path.startswith(prefix) for path in paths)] == []
