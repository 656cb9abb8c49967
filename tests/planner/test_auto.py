"""``auto``: the planner chooses with the first batch, and results equal those of a single process."""

import sys
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.plan.plan import DEFAULT_PASSES
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.training.options import TrainingOptions
from counterpoint.training.plan_resolution import AutoStrategy, trace_model_spec
from counterpoint.world.cluster import Cluster, Level, Link
from counterpoint.world.cluster_file import format_cluster
from tests.training.trainers import ADAMW, build_seeded, dataset, fit, max_difference, mlp, params_of


class Odd(nn.Module):
    """Cannot be traced: its control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > -1e9 else x


def make_optimizer_spec(model, optimizer=ADAMW):
    return OptimizerSpec(optimizer, dict(model.named_parameters()))


def trained(strategy, num_samples=48, **options):
    """One epoch of batches that any plan for four ranks can divide."""
    model = mlp()
    with cp.Trainer(model, loss=F.cross_entropy, optimizer=ADAMW, strategy=strategy, **options) as trainer:
        history = trainer.fit(dataset(num_samples), batch_size=12)
    return trainer, params_of(model), history.losses


def test_auto_on_four_ranks_equals_a_single_process():
    trainer, weights, losses = trained("auto(4)")
    _, expected, solo_losses = trained("solo")
    assert trainer.plan.num_ranks == 4
    assert max_difference(weights, expected) < 1e-12
    assert losses == pytest.approx(solo_losses, rel=1e-12)


def test_auto_without_a_launcher_is_a_single_process():
    trainer, weights, losses = trained("auto")
    _, expected, solo_losses = trained("solo")
    assert str(trainer.plan) == "solo"
    assert losses == solo_losses
    assert max_difference(weights, expected) == 0


def test_auto_keeps_given_microbatches_and_passes():
    trainer, _, losses = trained("auto(2)", num_microbatches=2, passes=("overlap",))
    assert (trainer.plan.num_ranks, trainer.plan.num_microbatches, trainer.plan.passes) == (2, 2, ("overlap",))
    assert losses == pytest.approx(trained("solo")[2], rel=1e-12)


def test_a_custom_loop_chooses_with_its_first_batch():
    inputs, targets = dataset(24)[:]
    losses = {}
    for strategy in ("auto(2)", "solo"):
        model = mlp()
        with cp.parallelize(model, ADAMW(model.parameters()), F.cross_entropy, strategy=strategy) as step:
            losses[strategy] = [step(inputs, targets) for _ in range(3)]
    assert losses["auto(2)"] == pytest.approx(losses["solo"], rel=1e-12)


def test_the_choice_does_not_depend_on_the_weights_nor_touch_them():
    one, two = mlp(), mlp()
    with torch.no_grad():
        next(two.parameters()).normal_()
    before = params_of(one)
    plans = {
        AutoStrategy(4, None, ()).choose_plan(
            model, make_optimizer_spec(model), torch.randn(8, 6).double(), TrainingOptions(), 48
        )
        for model in (one, two)
    }
    assert len(plans) == 1
    assert max_difference(params_of(one), before) == 0


def test_an_optimizer_that_needs_whole_tensors_never_gets_shards():
    sliced = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    inputs = torch.randn(4, 64)
    plans = {
        kind: AutoStrategy(2, None, ()).choose_plan(
            sliced, make_optimizer_spec(sliced, partial(kind, lr=0.1)), inputs, TrainingOptions(), 4
        )
        for kind in (optim.SGD, optim.Adafactor)
    }
    assert "tensor" in str(plans[optim.SGD]), "small batches, large weights"
    assert "tensor" not in str(plans[optim.Adafactor])


def test_the_choice_is_for_the_cluster_that_is_given():
    sliced = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    far = Cluster(link=Link(latency_s=1.0, bytes_per_s=1e12))
    plans = [
        str(
            AutoStrategy(2, None, ()).choose_plan(
                sliced, make_optimizer_spec(sliced, partial(optim.SGD, lr=0.1)), torch.randn(4, 64), given, 4
            )
        )
        for given in (TrainingOptions(), TrainingOptions(cluster=far))
    ]
    assert "tensor" in plans[0]
    assert "tensor" not in plans[1], "every message takes a second, and slices need more of them"


def test_a_cluster_file_is_read_before_anything_starts(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(format_cluster(Cluster(levels=(Level("host", 2, Link()),))), encoding="utf-8")
    trainer = cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(4)", cluster=file)
    with pytest.raises(cp.PlanError, match="4 ranks do not fit into a cluster of 2"):
        trainer.fit(dataset(), batch_size=12)
    file.write_text("device: fast", encoding="utf-8")
    with pytest.raises(cp.PlanError, match=r"cluster.yaml:1: device is fast; it must have keys"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(4)", cluster=str(file))


def test_a_value_that_is_not_a_cluster_is_rejected():
    with pytest.raises(cp.PlanError, match="cluster=4 is a int; give a Cluster, its name, or the path of its file"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(4)", cluster=4)


def test_a_model_that_cannot_be_traced_still_gets_a_plan():
    model = build_seeded(Odd)
    spec = trace_model_spec(model, make_optimizer_spec(model), torch.randn(8, 6).double(), None)
    assert spec.num_blocks == 1
    _, history = fit(cp.Plan.parse("solo"), build_seeded(Odd))
    with cp.Trainer(build_seeded(Odd), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(2)") as trainer:
        losses = trainer.fit(dataset(), batch_size=12).losses
    assert losses == pytest.approx(history.losses, rel=1e-12)


def test_frozen_parameters_are_not_planned_with():
    model = mlp()
    model[0].weight.requires_grad_(False)
    names = [
        param.name
        for param in trace_model_spec(model, make_optimizer_spec(model), torch.randn(8, 6).double(), None).params
    ]
    assert "0.weight" not in names
    assert "2.weight" in names


def test_auto_is_rejected_as_part_of_a_plan():
    with pytest.raises(cp.PlanError, match="no strategy 'auto'"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(2) * data(2)")


def test_a_batch_that_no_plan_can_divide_is_rejected_before_anything_starts():
    trainer = cp.Trainer(build_seeded(Odd), loss=F.cross_entropy, optimizer=ADAMW, strategy="auto(5)")
    with pytest.raises(cp.PlanError, match="batch_size=10 or 15"):
        trainer.fit(dataset(), batch_size=11)
    assert trainer.local_ranks is None


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("is_shared", [False, True], ids=["links", "cards"])
@pytest.mark.parametrize("per_host", [1, 4])
def test_a_gpt_is_planned_for_eight_hosts_in_less_than_twenty_seconds_of_cpu_time(capsys, per_host, is_shared):
    """GPT B of the data-parallel benchmark, from its first batch on; in CPU seconds of this process."""
    model = GPT(GPTShape(num_layers=6, width=256, head_dim=64, context=128, num_tokens=4096, dropout=0.0))
    network = Level("network", 8, Link(50e-6, 125e6), is_shared=is_shared)
    options = TrainingOptions(cluster=Cluster(levels=(Level("host", per_host, Link(5e-6, 5e9)), network)))
    inputs = torch.randint(0, 4096, (8, 128))
    began = time.process_time()
    plan = AutoStrategy(8 * per_host, None, DEFAULT_PASSES).choose_plan(
        model, make_optimizer_spec(model), inputs, options, 64
    )
    took_s = time.process_time() - began
    with capsys.disabled():
        sys.stdout.write(f"\nauto plans GPT B for 8 hosts of {per_host} in {took_s:.1f} s: {plan}\n")
    assert plan.num_ranks == 8 * per_host
    assert took_s < 20
