"""What cannot be split into stages, or not into microbatches: said before the first step, in both doors alike."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import counterpoint as cp
from tests.training.trainers import (
    ADAMW,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    list_rank_threads,
    max_difference,
    mlp,
    params_of,
)

HERE = Path(__file__).name
ENTRY_POINTS = ["fit", "parallelize"]


class Blocks(nn.Module):
    """Four layers; something of the test's own is done between the second and the third."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), *(nn.Linear(8, 8) for _ in range(2))])
        self.head = nn.Linear(8, 3)
        self.between = between

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = self.between(x) if index == 1 else x
        return self.head(x)


def blocks(between):
    return build_seeded(lambda: Blocks(between))


def train(entry_point, model, strategy="pipeline(2)", batch=12, **options):
    data = dataset(batch)
    if entry_point == "fit":
        return fit(cp.Plan.parse(strategy).with_microbatches_for(batch), model, data, progress="off", **options)
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=strategy, **options) as step:
        step(*data.tensors)
    return params_of(model), None


def refused(entry_point, model, strategy="pipeline(2)", error=cp.PlanError, **options):
    """Return the error's text; the model is as it was, and no rank is left."""
    before = params_of(model)
    with pytest.raises(error) as caught:
        train(entry_point, model, strategy, **options)
    assert equal_bits(params_of(model), before)
    assert list_rank_threads() == []
    return str(caught.value)


def by_values(x):
    return x if x.sum() > 0 else -x


@pytest.mark.long(quick=["parallelize"])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_model_that_cannot_be_traced_is_refused_with_its_line_and_what_to_do(entry_point):
    text = refused(entry_point, blocks(by_values))
    assert re.match(
        rf"tracing the model stopped in Blocks at \S+{HERE}:\d+ 'return x if x.sum\(\) > 0 else -x': ", text
    )
    assert text.endswith("or make the model an nn.Sequential, whose children may contain any code")


@pytest.mark.long(quick=["fit"])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_one_memory_under_two_parameters_of_different_stages_is_refused_with_the_way_to_tie_them(entry_point):
    model = mlp()
    model[4].weight = nn.Parameter(model[2].weight.detach()[:3])
    text = refused(entry_point, model)
    assert text.startswith(
        "4.weight and 2.weight are two parameters in one piece of memory, but under pipeline(2) ranks"
    )
    assert "make them one parameter (second.weight = first.weight), which may have several names" in text


def test_one_parameter_under_two_names_is_split_through_and_trains_as_on_one_device():
    def tied():
        model = Blocks()
        model.layers[2].weight = model.layers[1].weight
        return model

    mine, theirs = (fit(one, build_seeded(tied), progress="off")[0] for one in ("pipeline(4)", "solo"))
    assert max_difference(mine, theirs) <= 1e-12


@pytest.mark.long(quick=["pipeline(2, balance=(5,1))-balance=(5, 1) adds up to 6 blocks..."])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("pipeline(5)", "the pipeline has 5 stages, but the model has only 4 blocks; every stage needs one: "),
        ("interleaved(3)", "interleaved, chunks_per_stage=2) has 6 chunks, 2 for each of 3 stages, but the model has only 4 bl"),
        ("pipeline(2, balance=(5,1))", "balance=(5, 1) adds up to 6 blocks, but the model has 4; the stages toge"),
    ],
)  # fmt: skip
def test_more_stages_or_chunks_than_blocks_are_refused(entry_point, strategy, message):
    assert message in refused(entry_point, blocks(torch.tanh), strategy)


def test_layers_without_parameters_never_make_a_stage_of_their_own():
    """However many there are, and wherever: they belong to the layer before them, the first ones to the first layer."""
    silent = [nn.Tanh(), nn.Flatten(), nn.Dropout(0.0)]
    model = build_seeded(lambda: nn.Sequential(*silent, nn.Linear(6, 8), *silent, nn.Linear(8, 3), *silent))
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy="pipeline(2)") as step:
        step(*dataset(12).tensors)
        compiled = step.local_ranks.compiled
        assert compiled is not None
        assert [block.params for block in compiled.model.blocks] == [
            ("3.weight", "3.bias"),
            ("7.weight", "7.bias"),
        ]
    assert "but the model has only 2 blocks" in refused(
        "fit", build_seeded(lambda: nn.Sequential(*silent, nn.Linear(6, 3), nn.Linear(3, 3))), "pipeline(3)"
    )


@pytest.mark.long(quick=["the last half-interleaved(2)"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "gpipe(4)", "interleaved(2)", "zero_bubble(2) * zero(2, level=2)"])
@pytest.mark.parametrize("trained", [slice(4, None), slice(0, 4)], ids=["the last half", "the first half"])
def test_a_stage_that_trains_nothing_passes_on_what_others_need(strategy, trained):
    def half():
        model = Blocks().requires_grad_(requires_grad=False)
        for param in list(model.parameters())[trained]:
            param.requires_grad_()
        return model

    mine, theirs = (fit(one, build_seeded(half), progress="off")[0] for one in (strategy, "solo"))
    assert max_difference(mine, theirs) <= 1e-12


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_batch_that_does_not_divide_into_microbatches_is_refused_with_the_numbers_that_do(entry_point):
    options = (
        {"num_microbatches": 5}
        if entry_point == "parallelize"
        else {"strategy": cp.Plan.parse("pipeline(2)", num_microbatches=5)}
    )
    with pytest.raises(
        cp.PlanError, match=r"^a batch of 12 samples cannot be split into the 5 equal microbatches of pipeline"
    ):
        call_entry_point(entry_point, blocks(torch.tanh), **options)


def call_entry_point(entry_point, model, strategy="pipeline(2)", **options):
    if entry_point == "fit":
        return fit(strategy, model, dataset(12), progress="off", **options)
    with cp.parallelize(model, ADAMW, F.cross_entropy, strategy=strategy, **options) as step:
        return step(*dataset(12).tensors)


@pytest.mark.long(quick=["pipeline(4)"])
@pytest.mark.parametrize(
    "strategy", ["gpipe(2)", "pipeline(4)", "interleaved(2)", "zero_bubble(2, chunks_per_stage=2)"]
)
def test_only_the_last_batch_of_an_epoch_may_be_uneven_and_trains_as_on_one_device(strategy):
    """46 samples make three batches of 12 and one of 10: microbatches of 3, 3, 2 and 2."""
    mine, theirs = (fit(one, blocks(torch.tanh), progress="off")[0] for one in (strategy, "solo"))
    assert max_difference(mine, theirs) <= 1e-12


def centered(x):
    return x - x.mean(0)


@pytest.mark.long(quick=["pipeline(2) * data(2)-parallelize"])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("strategy", ["gpipe(2)", "pipeline(2) * data(2)", "pipedream_2bw(2)"])
def test_a_model_whose_output_depends_on_the_whole_batch_is_refused(entry_point, strategy):
    text = refused(entry_point, blocks(centered), strategy)
    assert re.match(
        r"the output of Blocks for a sample depends on the other samples of its batch: it changes by \d\.\de[-+]0\d of",
        text,
    )
    assert (
        "take means and norms over the features of one sample, and let no branch depend on several samples, give "
        "num_microbatches=1, name with shared=(NAME,) an "
        "input that has no samples, or pass cross_sample='acc" in text
    )


def test_a_chain_whose_output_depends_on_the_whole_batch_is_refused_too():
    class Centered(nn.Module):
        def forward(self, x):
            return centered(x)

    assert "the output of Sequential for a sample depends" in refused("fit", nn.Sequential(*mlp(), Centered()))


def test_microbatches_may_be_accepted_as_batches_and_one_microbatch_is_the_whole_batch():
    for options in ({"cross_sample": "accept", "num_microbatches": 4}, {"num_microbatches": 1}):
        result = []
        for strategy in ("pipeline(2)", "solo"):
            result.append(blocks(centered))
            call_entry_point("parallelize", result[-1], strategy, **options)
        assert max_difference(*map(params_of, result)) <= 1e-12


@pytest.mark.long(quick=["<lambda>"])
@pytest.mark.parametrize("between", [lambda x: x + torch.randn_like(x), nn.BatchNorm1d(8, track_running_stats=False)])
def test_noise_and_norms_of_microbatches_are_not_taken_for_it(between):
    assert len(train("fit", blocks(between))[1].losses) == 1


class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def hooked(x):
    x.register_hook(torch.neg)
    return x


def again(x):
    return checkpoint(torch.tanh, x, use_reentrant=True)


@pytest.mark.long(quick=["apply-Blocks has the autograd.Function Reversed-parallelize"])
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize(
    ("between", "what"),
    [
        (Reversed.apply, "Blocks has the autograd.Function Reversed"),
        (hooked, "Blocks has a hook on a gradient, which its forward registers"),
        (again, "Blocks has the autograd.Function CheckpointFunction"),
    ],
)
def test_a_custom_backward_that_a_trace_would_lose_is_refused_by_name(entry_point, between, what):
    """It would train silently with the gradients of the forward's operations."""
    text = refused(entry_point, blocks(between))
    assert text.startswith(
        f"{what}, but a model is split along the operations of its forward, whose own gradients would"
    )
    assert "write it as an operation (torch.library.custom_op with register_autograd)" in text


@pytest.mark.long(quick=["pipedream(1, vertical_sync=on)"])
@pytest.mark.parametrize("strategy", ["pipedream(1)", "pipedream(1, replicas=(2))", "pipedream(1, vertical_sync=on)"])
def test_an_async_pipeline_of_one_stage_has_one_update_in_a_step(strategy):
    plan = cp.Plan.parse(strategy, num_microbatches=4)
    result = refused("parallelize", mlp(), plan)
    assert "has one stage" in result
    assert "num_microbatches=" in result


@pytest.mark.long(quick=["gpipe(1)", "interleaved(1)", "mpi_caffe(1)"])
@pytest.mark.parametrize(
    "strategy", ["pipedream_2bw(1)", "gpipe(1)", "interleaved(1)", "zero_bubble(1)", "mpi_caffe(1)", "pipeline(1)"]
)
def test_pipelines_of_one_stage_are_solo(strategy):
    result, expected = (
        train("parallelize", mlp(), cp.Plan.parse(text, num_microbatches=4))[0] for text in (strategy, "solo")
    )
    assert max_difference(result, expected) <= 1e-12
