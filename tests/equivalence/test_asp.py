"""An asynchronous server gives up "equals solo"; instead it equals its own journal, played back one by one."""

from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor, optim

from counterpoint.data.sampler import split_batch
from counterpoint.testing import parity
from counterpoint.testing.parity_models import ADAMW, TrainConfig, make_parity_model, plan_for
from tests.references.asp import asp


def played_back(trained, recipe, run, num_workers):
    """What the reference makes of the journals; a worker's part of a batch is what its microbatches hold."""
    each = recipe.num_microbatches // num_workers
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {worker: [] for worker in range(num_workers)}
    for inputs, targets in trained.batches:
        places = split_batch(len(inputs), recipe.num_microbatches)
        for worker, part in parts.items():
            start, stop = places[worker * each][0], places[(worker + 1) * each - 1][1]
            part.append((inputs[start:stop], targets[start:stop]))
    journals = [[(entry.unit, entry.worker) for entry in journal] for journal in run.server_updates]
    model = asp(trained.build(), units=run.compiled.model.units, journals=journals, parts=parts,
                loss=trained.loss, optimizer=recipe.optimizer)  # fmt: skip
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.long(quick=["asp(2)", "asp(2, servers=2)"])
@pytest.mark.parametrize("strategy", ["asp(2)", "asp(2, servers=2)", "asp(3, servers=2)", "asp(4)"])
def test_an_asynchronous_server_equals_its_journal_played_back(strategy):
    num_workers = int(strategy[4])
    trained, recipe = make_parity_model("mlp"), TrainConfig(num_microbatches=2 * num_workers)
    run = parity.train(trained, plan_for(strategy, recipe.num_microbatches), recipe)
    expected = played_back(trained, recipe, run, num_workers)
    assert (
        parity.max_difference(parity.relative_difference(run.params[name], value) for name, value in expected.items())
        <= parity.TOLERANCE
    )


@pytest.mark.parametrize("optimizer", [ADAMW, partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)])
def test_a_worker_without_samples_changes_nothing_and_gets_the_weights(optimizer):
    """Batches of one sample leave the second worker empty; momentum and weight decay would move the weights for it."""
    whole = make_parity_model("mlp")
    short = [
        (inputs[:count], targets[:count])
        for (inputs, targets), count in zip(whole.batches, (8, 1, 8, 1, 8), strict=True)
    ]
    trained, recipe = replace(whole, batches=tuple(short)), TrainConfig(optimizer, num_microbatches=2)
    run = parity.train(trained, plan_for("asp(2)", 2), recipe)
    expected = played_back(trained, recipe, run, 2)
    assert (
        parity.max_difference(parity.relative_difference(run.params[name], value) for name, value in expected.items())
        <= parity.TOLERANCE
    )
    assert max(entry.version for entry in run.server_updates[0]) == 8
    assert len(run.server_updates[0]) == 10 * len(run.compiled.model.units)


@pytest.mark.parametrize(("strategy", "num_workers"), [("asp(2)", 2), ("asp(2, servers=2)", 2)])
def test_every_push_is_one_update_with_a_version_of_its_own(strategy, num_workers):
    run = parity.train(make_parity_model("mlp"), plan_for(strategy, 4), TrainConfig())
    for unit in run.compiled.model.units:
        versions = [entry.version for entry in sum(run.server_updates, ()) if entry.unit == unit]
        assert versions == list(range(1, 5 * num_workers + 1))
