"""A plan that sums in a code against the same workers simulated one after the other."""

from functools import partial

from torch import optim

from counterpoint.data.sampler import split_batch
from counterpoint.launchers.environment import detect
from counterpoint.plan.plan import Plan
from counterpoint.strategies.data import Data
from counterpoint.testing import parity
from counterpoint.testing.parity_models import TrainConfig, make_parity_model, plan_for
from counterpoint.training.distributed_world import open_world
from tests.references import compression

MOMENTUM = partial(optim.SGD, lr=0.2, momentum=0.9)


def count_workers(strategy, num_micros):
    """The strategy that sums in a code, how many workers that are, and how many groups of them."""
    strategies = Plan.parse(strategy.split("+")[0]).strategies
    coded = next(one for one in strategies if isinstance(one, Data) and one.codec)
    after = strategies[strategies.index(coded) + 1 :]
    assert num_micros % coded.degree == 0
    return coded, coded.degree, 1 if not after else after[0].degree


def split_samples(trained, num_micros, num_workers):
    """For every step what every worker's microbatches hold."""
    each = num_micros // num_workers
    batches = []
    for inputs, targets in trained.batches:
        places = split_batch(len(inputs), num_micros)
        spans = [(places[at * each][0], places[(at + 1) * each - 1][1]) for at in range(num_workers)]
        batches.append([(inputs[start:stop], targets[start:stop]) for start, stop in spans])
    return batches


def reference(trained, recipe, strategy):
    """The losses and parameters that the plan promises."""
    coded, num_workers, num_groups = count_workers(strategy, recipe.num_microbatches)
    model = trained.build()
    name, _, number = coded.codec.partition(":")
    number = {"topk": 0.01}.get(name) if not number else int(number) if name == "powersgd" else float(number)
    combine = {}
    for key, _ in model.named_parameters():
        groups = [compression.Codec(name, number) for _ in range(num_groups)]
        combine[key] = partial(reduce_in_groups, groups, num_workers) if name != "adasum" else compression.adasum_tree
    batches = split_samples(trained, recipe.num_microbatches, num_workers * num_groups)
    losses = compression.train(model, batches=batches, loss=trained.loss, optimizer=recipe.optimizer, combine=combine,
                         scaled=name != "adasum")  # fmt: skip
    return losses, {key: param.detach() for key, param in model.named_parameters()}


def reduce_in_groups(groups, size, gradients):
    """The sum of what each group makes of its own members."""
    return sum(group(gradients[at * size : (at + 1) * size]) for at, group in enumerate(groups))


def parameter_error(strategy, world=None):
    """How far losses and parameters of five steps are from those of the reference."""
    num_micros = 6 if "(3" in strategy else 4
    trained, recipe = make_parity_model("mlp"), TrainConfig(MOMENTUM, num_microbatches=num_micros)
    run = parity.train(trained, plan_for(strategy, num_micros), recipe, world)
    losses, params = reference(trained, recipe, strategy)
    off = [abs(mine - theirs) / theirs for mine, theirs in zip(run.losses, losses, strict=True)]
    return max([*off, *(parity.relative_difference(run.params[name], value) for name, value in params.items())])


def parameter_errors_as_rank(rows):
    """The distance of every row, as one of the processes that a launcher started."""
    world = open_world(detect(), 1, 60.0)
    result = [parameter_error(row, world) for row in rows]
    world.close()
    return result
