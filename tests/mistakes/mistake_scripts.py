"""Mistakes as users make them, one function each, for three ranks in processes."""

import contextlib
import os
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from tests.training.trainers import batch_norm_mlp, build_seeded, dataset, mlp, params_of

SGD = partial(optim.SGD, lr=0.1)
NUM_RANKS = 3


def rank():
    return int(os.environ["RANK"])


def step_of(model=None, strategy="data(3)", **options):
    return cp.parallelize(mlp() if model is None else model, SGD, F.cross_entropy, strategy=strategy, **options)


def parts_of(sizes):
    """The samples of every rank in one step, consecutive in the dataset."""
    inputs, targets = dataset().tensors
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return [(inputs[start : start + size], targets[start : start + size])
            for start, size in zip(starts, sizes, strict=True)]  # fmt: skip


def train_on_own(steps, strategy="data(3)", **options):
    """Train with so many samples of each rank in each step; a rank that has None leaves its loop."""
    model = mlp()
    losses = []
    with step_of(model, strategy, batches="per_rank", **options) as step:
        for sizes in steps:
            if sizes[rank()] is None:
                break
            losses.append(step(*parts_of([size or 0 for size in sizes])[rank()]))
        step.finish()
    return losses, {name: value.tolist() for name, value in params_of(model).items()}


def sizes_that_differ():
    return train_on_own([(4, 4, 2), (4, 4, 4)])


def sizes_that_differ_as_meant():
    return train_on_own([(4, 4, 2)], uneven=True)


def sizes_that_may_not_differ():
    return train_on_own([(4, 4, 2)], uneven=False)


def a_rank_that_runs_out():
    return train_on_own([(4, 4, 4), (4, None, None), (3, None, None)])


def a_rank_that_may_not_run_out():
    return train_on_own([(4, 4, 4), (4, 4, None)], uneven=False)


def an_empty_batch():
    return train_on_own([(4, 4, 4), (4, 0, 3), (0, 0, 0)])


def a_first_batch_without_samples():
    return train_on_own([(4, 0, 4)])


def own_batches_of_a_pipeline():
    return train_on_own([(4, 4, 4)], "pipeline(3)", num_microbatches=2)


def one_batch_for_all_stages():
    model = mlp()
    with step_of(model, "pipeline(3)", batches="per_rank", num_microbatches=2) as step:
        losses = [step(*parts_of((size,))[0]) for size in (12, 5)]
    return losses, {name: value.tolist() for name, value in params_of(model).items()}


def a_mean_over_uneven_parts():
    with step_of(batches="per_rank") as step:
        return step.mean([1.0, 2.0, float("nan")][rank()], [3, 1, 0][rank()])


def rates_that_differ():
    step = step_of(batches="per_rank")
    step(*parts_of((4, 4, 4))[rank()])
    step.optimizer.param_groups[0]["lr"] = 0.1 if rank() else 0.2
    step(*parts_of((4, 4, 4))[rank()])


def the_same_samples():
    with step_of(batches="per_rank") as step:
        step(*dataset(12).tensors)


def sizes_of_one_batch_that_differ():
    inputs, targets = dataset().tensors
    step_of()(inputs[: 12 + rank()], targets[: 12 + rank()])


class Moody(nn.Module):
    """Uses its side branch only on some ranks, or on none."""

    def __init__(self, takers):
        super().__init__()
        self.main, self.side = nn.Linear(6, 3), nn.Linear(6, 3)
        self.takers = takers

    def forward(self, x):
        return self.main(x) + self.side(x) if rank() in self.takers else self.main(x)


def a_branch_that_one_rank_does_not_take():
    with step_of(build_seeded(lambda: Moody((0, 2)))) as step:
        return [step(*dataset(12).tensors) for _ in range(2)]


def a_branch_that_no_rank_takes():
    with step_of(build_seeded(lambda: Moody(()))) as step:
        step(*dataset(12).tensors)


class SquareRoot(nn.Module):
    """Its gradient at 0 is infinite."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x * self.scale).abs().sqrt()


def a_gradient_that_is_not_finite():
    """On rank 1 alone, in the second of its two microbatches; its loss is finite."""
    model = build_seeded(lambda: nn.Sequential(SquareRoot(), nn.Linear(6, 3)))
    inputs, targets = dataset(12).tensors
    with step_of(model, num_microbatches=2) as step:
        step(inputs, targets)
        inputs = inputs.clone()
        inputs[7] = 0.0
        step(inputs, targets)


def weights_that_share_memory():
    model = mlp()
    model[2].weight = nn.Parameter(torch.zeros(8, 8).double())
    model[4].weight = nn.Parameter(model[2].weight.detach()[:3])
    step_of(model)(*dataset(12).tensors)


def a_model_in_evaluation_mode_on_one_rank():
    step_of(mlp().train(rank() != 1))(*dataset(12).tensors)


def a_module_in_evaluation_mode_on_one_rank():
    model = mlp()
    model[3].train(rank() != 1)
    step_of(model)(*dataset(12).tensors)


def another_dtype():
    model = mlp()
    if rank() == 1:
        model[4].weight.data = model[4].weight.data.float()
    step_of(model)(*dataset(12).tensors)


def another_device():
    model = mlp()
    if rank() == 1:
        model[4] = nn.Linear(8, 3, device="meta", dtype=torch.float64)
    step_of(model)(*dataset(12).tensors)


def another_width():
    width = 8 if rank() < 2 else 4
    step_of(build_seeded(lambda: nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))))(*dataset(12).tensors)


def another_depth():
    layers = [nn.Linear(6, 6) for _ in range(1 + (rank() == 2))]
    step_of(nn.Sequential(*layers, nn.Linear(6, 3)).double())(*dataset(12).tensors)


def another_dropout():
    step_of(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2 if rank() else 0.1)).double())(*dataset(12).tensors)


def another_plan():
    step_of(strategy="data(3)" if rank() else "zero(3, level=2)")(*dataset(12).tensors)


def other_first_weights(**options):
    torch.manual_seed(rank())
    model = nn.Linear(6, 3).double()
    first = model.weight.detach().clone()
    with contextlib.suppress(cp.PlanError), step_of(model, **options) as step:
        step.optimizer.param_groups[0]["lr"] = 0.0
        step(*dataset(12).tensors)
    torch.manual_seed(0)
    rank_0s = nn.Linear(6, 3).double().weight
    return [torch.equal(model.weight, first), torch.equal(model.weight, rank_0s)]


def other_first_weights_that_are_refused():
    torch.manual_seed(rank())
    step_of(nn.Linear(6, 3).double(), init_sync="verify")(*dataset(12).tensors)


class Named(nn.Module):
    """Its layers are in the order of its argument."""

    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})

    def forward(self, x):
        return sum(layer(x) for layer in self.layers.values())


def another_rate():
    cp.parallelize(mlp(), partial(optim.SGD, lr=0.1 * (1 + rank())), F.cross_entropy, strategy="data")(
        *dataset(12).tensors
    )


def another_seed():
    cp.parallelize(mlp(), partial(optim.SGD, lr=0.1), F.cross_entropy, strategy="data", seed=rank() // 2)(
        *dataset(12).tensors
    )


def another_clip_norm():
    cp.parallelize(mlp(), partial(optim.SGD, lr=0.1), F.cross_entropy, strategy="data", clip_norm=1.0 + rank())(
        *dataset(12).tensors
    )


def another_loss():
    loss = F.cross_entropy if rank() else F.nll_loss
    cp.parallelize(mlp(), partial(optim.SGD, lr=0.1), loss, strategy="data")(*dataset(12).tensors)


def another_smoothing():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1 * rank())
    cp.parallelize(mlp(), partial(optim.SGD, lr=0.1), loss, strategy="data")(*dataset(12).tensors)


def another_order():
    names = ["left", "right"] if rank() != 1 else ["right", "left"]
    step_of(Named(names).double())(*dataset(12).tensors)


def a_rate_that_changes_on_one_rank():
    step = step_of()
    for number in range(2):
        step(*dataset(12).tensors)
        step.optimizer.param_groups[0]["lr"] = 0.2 if number == 0 and rank() == 1 else 0.1


def a_step_that_one_rank_leaves_out():
    step = step_of()
    step(*dataset(12).tensors)
    if rank() != 1:
        step(*dataset(12).tensors)
    step.export_weights()


def an_evaluation_on_one_rank():
    step = step_of()
    step(*dataset(12).tensors)
    if rank() == 0:
        step.export_weights()
    step(*dataset(12).tensors)


def an_exception_on_one_rank():
    step = step_of()
    for _ in range(3):
        step(*dataset(12).tensors)
        if rank() == 2:
            raise ValueError("sample 7 is broken")


def batch_norm_by_microbatches():
    with step_of(batch_norm_mlp(), "pipeline(3)", num_microbatches=2) as step:
        return [step(*dataset(12).tensors) for _ in range(2)]


def batch_norm_by_microbatches_as_meant():
    with step_of(batch_norm_mlp(), "pipeline(3)", num_microbatches=2, batch_norm="deferred") as step:
        return [step(*dataset(12).tensors) for _ in range(2)]


def batch_norm_by_microbatches_that_is_refused():
    step_of(batch_norm_mlp(), "pipeline(3)", num_microbatches=2, batch_norm="error")(*dataset(12).tensors)


ALIKE = (
    sizes_that_differ, sizes_that_differ_as_meant, sizes_that_may_not_differ, a_rank_that_runs_out,
    a_rank_that_may_not_run_out, an_empty_batch, a_first_batch_without_samples, own_batches_of_a_pipeline,
    one_batch_for_all_stages, a_mean_over_uneven_parts, rates_that_differ, the_same_samples,
    a_branch_that_one_rank_does_not_take,
    weights_that_share_memory, a_model_in_evaluation_mode_on_one_rank, a_module_in_evaluation_mode_on_one_rank,
    another_dtype, another_device, another_width, another_depth, another_dropout, another_plan, another_rate,
    another_seed, another_clip_norm, another_loss, another_smoothing,
    other_first_weights, batch_norm_by_microbatches, batch_norm_by_microbatches_as_meant,
    batch_norm_by_microbatches_that_is_refused, other_first_weights_that_are_refused, another_order,
    sizes_of_one_batch_that_differ, a_branch_that_no_rank_takes,
)  # fmt: skip
"""Scripts after which all ranks can continue, and a last one after which they cannot."""
