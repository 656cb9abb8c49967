"""GPT-2 on padded batches under plans that give up "equals solo": each equals the sequential loop of its rule.

Every update is the mean over the tokens of the samples that it is made of: a worker's part, a microbatch, or a batch.
"""

from functools import partial

import pytest
from torch import optim

import counterpoint as cp
from counterpoint.data.sampler import split_batch
from counterpoint.testing.parity import relative_difference
from tests.equivalence.test_padded_language_models import (
    NO_DROPOUT,
    SAMPLES,
    build_float64,
    causal_loss,
    float64_loss,
    loader,
    own_loss,
)
from tests.equivalence.transformer_models import SGD, build, count_stages
from tests.references import async_pipeline as pipelines
from tests.references.asp import asp
from tests.references.double_buffering import double_buffering
from tests.references.easgd import easgd
from tests.references.local_sgd import local_sgd
from tests.references.ssp import ssp

PLAIN_SGD = partial(optim.SGD, lr=0.05)  # of which gradients several updates late do not enlarge rounding errors


def batches():
    """Return the batches of dicts that a loader makes, of the same number of samples."""
    return [batch for batch in loader() for _ in range(2) if len(batch["labels"]) == SAMPLES]


def reference_model(*, tied=True):
    """Return the model that references call with a dict."""
    model = build_float64() if tied else build_untied()
    model.register_forward_pre_hook(lambda module, args, kwargs: ((), {**args[0], **kwargs}), with_kwargs=True)
    return model


def build_untied():
    model = build("gpt2", **NO_DROPOUT, tie_word_embeddings=False)
    model.loss_function = float64_loss
    return model


def divide(batch, num_parts):
    """Return the inputs and the labels of each part."""
    slices = (slice(*bounds) for bounds in split_batch(SAMPLES, num_parts))
    parts = ({key: value[part] for key, value in batch.items()} for part in slices)
    return [(part, part["labels"]) for part in parts]


def train(strategy, optimizer, *, loss=causal_loss, num_microbatches=None, model=None):
    """Return the parameters, the losses of all batches, and the step, whose ranks have kept their journals."""
    model = model or build_float64()
    with cp.parallelize(model, optimizer, loss, strategy=strategy, num_microbatches=num_microbatches) as step:
        losses = [step(batch) for batch in batches()]
        losses += step.flush()
        step.export_weights()
        ranks = list(step.local_ranks.ranks.values())
        journals = [[(entry.unit, entry.worker) for entry in rank.interpreter.state.push_log] for rank in ranks]
        assert step.local_ranks.compiled is not None
        units = step.local_ranks.compiled.model.units
        stages = count_stages(step, model)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return params, [value for value in losses if value == value], units, [j for j in journals if j], stages


def parts_by_worker(num_workers):
    divided = [divide(batch, num_workers) for batch in batches()]
    return {worker: [parts[worker] for parts in divided] for worker in range(num_workers)}


def require_equal(params, expected):
    assert max(relative_difference(params[name], value.detach()) for name, value in expected.items()) < 1e-12


def require_equal_losses(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("loss", [causal_loss, own_loss])
@pytest.mark.parametrize(
    ("strategy", "num_workers", "num_microbatches"), [("asp(2)", 2, 2), ("asp(4, servers=2)", 4, 1)]
)
def test_an_asynchronous_server_applies_each_workers_own_mean_over_tokens(
    strategy, num_workers, num_microbatches, loss
):
    params, _, units, journals, _ = train(strategy, SGD, loss=loss, num_microbatches=num_microbatches)
    model = asp(
        reference_model(), units=units, journals=journals, parts=parts_by_worker(num_workers), loss=loss, optimizer=SGD
    )
    require_equal(params, dict(model.named_parameters()))


@pytest.mark.long(quick=["asp(2, pull_every=2)-options1"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ssp(2, staleness=1)", {"staleness": 1}), ("asp(2, pull_every=2)", {"pull_every": 2})],
)
def test_a_bounded_server_applies_each_workers_own_mean_over_tokens(strategy, options):
    params, _, units, journals, _ = train(strategy, PLAIN_SGD)
    model, _ = ssp(
        reference_model(), units=units, journals=journals, parts=parts_by_worker(2), loss=causal_loss,
        optimizer=PLAIN_SGD, **options,
    )  # fmt: skip
    require_equal(params, dict(model.named_parameters()))


@pytest.mark.long(quick=["2"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_an_elastic_average_is_of_workers_with_their_own_means_over_tokens(num_microbatches):
    params, _, units, journals, _ = train("easgd(2, alpha=0.25, tau=2)", SGD, num_microbatches=num_microbatches)
    center, _ = easgd(
        reference_model(), units=units, journals=journals, parts=parts_by_worker(2), loss=causal_loss, optimizer=SGD,
        alpha=0.25, tau=2,
    )  # fmt: skip
    require_equal(params, dict(center.named_parameters()))


@pytest.mark.long(quick=["2-sync_every=2-2-0"])
@pytest.mark.parametrize(("strategy", "every", "first"), [("sync_every=2", 2, 0), ("sync_every=2, sync_first=1", 2, 1)])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_replicas_of_local_sgd_update_with_their_own_means_over_tokens(strategy, every, first, num_microbatches):
    params, losses, *_ = train(f"data(2, {strategy})", SGD, num_microbatches=num_microbatches)
    parts = [divide(batch, 2) for batch in batches()]

    def weigh(step):
        tokens = [count_tokens(labels) for _, labels in parts[step]]
        return [number / sum(tokens) for number in tokens]

    expected, expected_losses = local_sgd(
        reference_model(), batches=parts, weigh=weigh, loss=causal_loss, optimizer=SGD, every=every, first=first
    )
    require_equal(params, expected)
    require_equal_losses(losses, expected_losses)


def count_tokens(labels):
    return int((labels[:, 1:] != -100).sum())


@pytest.mark.long(quick=["data(2, staleness=1)"])
@pytest.mark.parametrize("strategy", ["data(2, staleness=1)", "pipeline(2) * data(2, staleness=1)"])
def test_a_late_gradient_is_that_of_the_mean_over_all_tokens(strategy):
    params, losses, *_ = train(strategy, SGD, num_microbatches=2)
    whole = [(batch, batch["labels"]) for batch in batches()]
    expected, expected_losses = double_buffering(reference_model(), batches=whole, loss=causal_loss, optimizer=SGD)
    require_equal(params, expected)
    require_equal_losses(losses, expected_losses)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "read", "interval"),
    [
        ("pipedream(2)", pipelines.stashing((1, 1)), 1),
        ("pipedream(2, vertical_sync=on)", pipelines.vertical_sync((1, 1)), 1),
        ("pipedream_2bw(2)", pipelines.double_buffer(2), 2),
    ],
)
def test_a_stage_updates_with_the_mean_over_the_tokens_between_two_updates(strategy, read, interval):
    num_microbatches = 2
    params, losses, _, _, stages = train(strategy, PLAIN_SGD, num_microbatches=num_microbatches, model=build_untied())
    model = reference_model(tied=False)
    named = dict(model.named_parameters())
    owned = [{name: named[name] for name in stage} for stage in stages]
    parts = [part for batch in batches() for part in divide(batch, num_microbatches)]
    expected, expected_losses = pipelines.async_pipeline(
        model, updates=[(params, PLAIN_SGD(params.values())) for params in owned], batches=parts, loss=causal_loss,
        read=read, interval=lambda stage: interval, weigh=count_tokens,
    )  # fmt: skip
    require_equal(params, expected)
    tokens = [count_tokens(labels) for _, labels in parts]
    both = list(zip(tokens, expected_losses, strict=True))
    means = [
        sum(weight * value for weight, value in both[at : at + 2]) / sum(weight for weight, _ in both[at : at + 2])
        for at in range(0, len(both), 2)
    ]
    require_equal_losses(losses, means)
