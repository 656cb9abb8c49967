"""Plans for GPUs that nobody has measured."""

import pytest
import torch
from torch import optim
from torch.nn import functional as F

from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.model.precision import parse_precision
from counterpoint.planner.choose import rank_and_choose
from counterpoint.planner.enumerate import enumerate_plans
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.plan_resolution import trace_model_spec
from counterpoint.training.profiling import profile
from counterpoint.world.cluster_file import resolve_cluster

SEVEN_BILLION = GPTShape(num_layers=32, width=4096, head_dim=128, context=2048, num_tokens=32000)
NUM_BYTES_PER_PARAM = 4 + 4 + 8  # weights, gradients and Adam's states


def sequence_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def seven_billion_problem(cluster):
    precision = parse_precision("bf16")
    with torch.device("meta"):
        model, tokens = GPT(SEVEN_BILLION), torch.zeros(2, SEVEN_BILLION.context, dtype=torch.int64)
    device = resolve_cluster(cluster).device
    spec = trace_model_spec(model, OptimizerSpec(optim.AdamW, dict(model.named_parameters())), tokens, None, precision)
    estimated = profile(
        model, tokens, tokens, loss=sequence_loss, roofline_device=device, precision=precision, microbatch_sizes=[2]
    )
    return PlanningProblem(spec, resolve_cluster(cluster), 16, estimated)


@pytest.mark.long
@pytest.mark.timeout(240)  # about ten seconds where nothing else runs
def test_seven_billion_parameters_in_bf16_are_sharded_over_eight_h100():
    problem = seven_billion_problem("8xh100")
    plans = [plan for plan in enumerate_plans(8, problem.model) if "pipeline" not in str(plan)]
    choice = rank_and_choose(plans, problem)
    num_params = sum(param.num_elements for param in problem.model.params)
    assert 6.5e9 < num_params < 7.5e9
    assert problem.model.compute_dtype == "bf16"
    assert str(choice.plan).startswith("zero(8, level=3")
    predicted = choice.find_prediction(choice.plan)
    assert predicted is not None
    assert NUM_BYTES_PER_PARAM * num_params / 8 < predicted.memory_bytes < 72 * 2**30
    replicated = next(one for one in choice.ranking.predictions if str(one.plan) == "data(8)")
    assert replicated.memory_bytes > NUM_BYTES_PER_PARAM * num_params > replicated.capacity_bytes
