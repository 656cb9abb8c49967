"""Between two steps, processes hold what the formula of their strategy says: nothing whole outlives its use."""

from dataclasses import replace

import pytest
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.plan.plan import Plan
from counterpoint.planner.choose import rank_and_choose
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.prepare import compile_for, storage_sizes
from counterpoint.planner.ranking import predict_rank_bytes
from counterpoint.program.instruction import Forward
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.simulator.memory import memory_timeline
from counterpoint.training.plan_resolution import trace_model_spec
from counterpoint.world.cluster import Cluster, Device, Roofline
from tests.process.forked_ranks import run_forked
from tests.process.live_memory import (
    NUM_LAYERS,
    NUM_ROWS,
    make_wide_blocks,
    measure,
    measure_activations,
    measure_weights,
    train_wide_blocks,
)

pytestmark = pytest.mark.process
# Weights, gradients and Adam's two moments, in sizes of the model.
FORMULAS = {
    "2": {
        "data(2)": 1 + 1 + 2,
        "zero(2, level=1)": 1 + 1 + 2 / 2,
        "zero(2, level=2)": 1 + 1 / 2 + 2 / 2,
        "zero(2, level=3)": (1 + 1 + 2) / 2,
        "zero(2, level=3, reshard_after_forward=off)": (1 + 1 + 2) / 2,
        "zero(2, level=3, persistence_threshold=300000)": 1 + (1 + 2) / 2,  # every unit has 262,656 elements
        "pipeline(2)": (1 + 1 + 2) / 2,
        "tensor(2)": (1 + 1 + 2) / 2,
    },
    "4": {
        "data(4)": 1 + 1 + 2,
        "zero(4, level=1)": 1 + 1 + 2 / 4,
        "zero(4, level=2)": 1 + 1 / 4 + 2 / 4,
        "zero(4, level=3)": (1 + 1 + 2) / 4,
        "pipeline(4)": (1 + 1 + 2) / 4,
        "tensor(4)": (1 + 1 + 2) / 4,
    },
    "4 on two axes": {
        "zero(2, level=1) * data(2)": 1 + 1 + 2 / 2,
        "zero(2, level=2) * data(2)": 1 + 1 / 2 + 2 / 2,
        "zero(2, level=3) * data(2)": (1 + 1 + 2) / 2,
        "tensor(2) * data(2)": (1 + 1 + 2) / 2,
        "pipeline(2) * zero(2, level=1)": (1 + 1 + 2 / 2) / 2,
    },
}


MASTERS = "bf16(reduce=bf16, weights=compute)"
# Bytes of weights, gradients, and master weights with two moments, for each parameter.
BYTES = {
    2: {"data(2)": 2 + 2 + 12, "zero(2, level=1)": 2 + 2 + 12 / 2, "zero(2, level=2)": 2 + 2 / 2 + 12 / 2},
    4: {
        "zero(4, level=1)": 2 + 2 + 12 / 4,
        "zero(4, level=2)": 2 + 2 / 4 + 12 / 4,
        "zero(2, level=2) * data(2)": 2 + 2 / 2 + 12 / 2,
        "pipeline(2) * zero(2, level=1)": (2 + 2 + 12 / 2) / 2,
    },
}


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_ranks", BYTES)
def test_processes_have_the_bytes_of_the_table_of_zero_with_master_weights(num_ranks):
    formulas = BYTES[num_ranks]
    for measured in run_forked(measure, ranks=num_ranks, args=[list(formulas), "gloo", MASTERS]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


# The same in bytes for each parameter, with Adam's moments and master weights on disk.
OFFLOADED = {
    None: {
        "data(2)": 4 + 4,
        "zero(2, level=2)": 4 + 4 / 2,
        "zero(2, level=3)": 4 / 2 + 4 / 2,
        "pipeline(2)": (4 + 4) / 2,
    },
    MASTERS: {"data(2)": 2 + 2, "zero(2, level=2)": 2 + 2 / 2},
}


@pytest.mark.long(quick=["None"])
@pytest.mark.parametrize("precision", OFFLOADED)
def test_state_on_disk_is_not_live_between_steps(precision, tmp_path):
    formulas = OFFLOADED[precision]
    for measured in run_forked(measure, ranks=2, args=[list(formulas), "gloo", precision, str(tmp_path)]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


# The same with weights on disk, and Adam's moments in memory or on disk, too.
WEIGHTS = {
    ("offload:params=disk",): {"zero(2, level=3)": 4 / 2 + 8 / 2},
    ("offload:params=disk", "offload:state=disk"): {
        "zero(2, level=3)": 4 / 2,
        "zero(2, level=3, reshard_after_forward=off)": 4 / 2,
    },
}


@pytest.mark.parametrize("passes", WEIGHTS, ids=" ".join)
def test_weights_on_disk_are_not_live_between_steps(passes, tmp_path):
    formulas = WEIGHTS[passes]
    for measured in run_forked(measure, ranks=2, args=[list(formulas), "gloo", None, str(tmp_path), passes]):
        assert isinstance(measured, list), measured
        live = {plan: 4 * one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


def test_weights_on_disk_take_as_much_less_as_predicted_while_others_are_gathered(tmp_path):
    """In memory are the weights that the loss has been computed with, and no shard: none is read before their backward."""
    passes = [("overlap",), ("overlap", "offload:params=disk")]
    for measured in run_forked(measure_weights, ranks=2, args=[passes, str(tmp_path)]):
        assert isinstance(measured, list), measured
        (live, predicted), (live_rest, predicted_rest) = measured
        assert predicted - predicted_rest == NUM_LAYERS
        assert live - live_rest == pytest.approx(NUM_LAYERS, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", FORMULAS)
def test_live_tensors_are_those_of_the_formula(ranks, transport):
    formulas = FORMULAS[ranks]
    for measured in run_forked(measure, ranks=int(ranks[0]), args=[list(formulas), transport]):
        assert isinstance(measured, list), measured  # else an error
        live = {plan: one for plan, (one, _) in zip(formulas, measured, strict=True)}
        assert live == pytest.approx(formulas, rel=0.02)


def test_gloo_keeps_no_more_for_reductions_than_the_gradients_of_the_other_ranks():
    for measured in run_forked(measure, ranks=2, args=[["zero(2, level=1)"], "gloo"]):
        assert isinstance(measured, list), measured
        ((_, pooled),) = measured
        assert pooled <= 0.75  # a half of the gradient is received, and little is rounded up


def test_partitioned_activations_take_as_much_less_as_predicted():
    passes = [("recompute",), ("recompute", "partition_activations")]
    for measured in run_forked(measure_activations, ranks=2, args=["tensor(2)", passes]):
        assert isinstance(measured, list), measured
        (live, predicted), (live_parts, predicted_parts) = measured
        assert live - live_parts == pytest.approx(predicted - predicted_parts, rel=0.02)
        assert predicted - predicted_parts >= 2


def test_activations_on_disk_take_as_much_less_as_predicted(tmp_path):
    """The one that is being written may be on disk already."""
    passes = [("recompute",), ("recompute", "offload:activations=disk")]
    (measured,) = run_forked(measure_activations, ranks=1, args=["solo", passes, str(tmp_path)])
    assert isinstance(measured, list), measured
    (live, predicted), (live_rest, predicted_rest) = measured
    saved = predicted - predicted_rest
    assert saved == 5
    assert saved - 0.02 <= live - live_rest <= saved + 1.02


def plan_wide_blocks():
    """Return the plan that the planner chooses for half of the memory that recomputation saves, and the model's problem."""
    model, x, y = make_wide_blocks()
    device = replace(Device(), roofline=Roofline("cpu", (("fp32", 1e11),)))
    profile = cp.profile(model, x, y, loss=F.mse_loss, microbatch_sizes=(NUM_ROWS // 2,), roofline_device=device)
    spec = trace_model_spec(model, OptimizerSpec(optim.SGD, dict(model.named_parameters())), x, None)
    plan = replace(Plan.parse("data(2)"), passes=("overlap",))
    everything = replace(plan, passes=(*plan.passes, "recompute"))
    most, least = (
        max(predict_rank_bytes(one, spec, Cluster(), batch_size=NUM_ROWS, profile=profile))
        for one in (plan, everything)
    )
    limited = Cluster(Device(memory_bytes=(most + least) // 2))
    problem = PlanningProblem(spec, limited, NUM_ROWS, profile)
    return rank_and_choose([plan], problem).plan, problem


def predict_at_loss(plan, problem):
    """Return the bytes of a rank at the end of its last forward, and at most, where blocks are run one by one."""
    compiled, samples = compile_for(plan, problem.model, problem.cluster, NUM_ROWS, problem.profile)
    timeline = memory_timeline(compiled.program, storage_sizes(compiled.model, samples, problem.profile))[0]
    last = max(at for at, one in enumerate(compiled.program.unroll(1)[0]) if isinstance(one, Forward))
    return timeline[last + 1], max(timeline)


def test_a_choice_for_each_block_takes_as_predicted_and_has_the_losses_of_one_process():
    """It has more than the plan that recomputes everything, by what blocks keep."""
    chosen, problem = plan_wide_blocks()
    assert any(name.startswith("recompute:blocks=") for name in chosen.passes)
    everything = replace(chosen, passes=("overlap", "recompute"))
    (predicted, peak), (predicted_least, _) = (predict_at_loss(one, problem) for one in (chosen, everything))
    assert peak <= problem.cluster.device.memory_bytes
    expected = train_alone(*make_wide_blocks())
    passes = [list(one.passes) for one in (chosen, everything)]
    for measured in run_forked(train_wide_blocks, ranks=2, args=["data(2)", passes]):
        assert isinstance(measured, list), measured
        (live, losses), (live_least, _) = measured
        assert live - live_least == pytest.approx(predicted - predicted_least, rel=0.02)
        assert live <= problem.cluster.device.memory_bytes
        assert losses == pytest.approx(expected, rel=1e-12)


def train_alone(model, x, y):
    """Return the losses of three steps of a plain loop."""
    optimizer, losses = optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
