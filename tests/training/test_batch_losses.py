"""Losses of the whole batch: each plan evaluates them once on all outputs, and trains as a plain loop does."""

from functools import cache, partial
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.shm.native import native
from counterpoint.runtime.loss.batch_loss import merge_leaf
from counterpoint.runtime.loss.loss_check import LossCheck
from tests.training.trainers import build_seeded, max_difference, params_of

SAMPLES = 12
PLANS = [
    ("solo", 1), ("solo", 4), ("data(4)", None), ("data(2)", 3), ("data(2, update=sharded)", 2), ("zero1(2)", 2),
    ("zero2(2)", 2), ("zero3(2)", None), ("zero3(2)", 2), ("tree(2)", 2), ("gpipe(2)", 4), ("gpipe(2, replicas=(1,2))", 4),
    ("pipeline(2)", 1), ("gpipe(2) * data(2)", 3), ("gpipe(2) * zero3(2)", 2), ("server(2, consistency=bsp)", 2),
]  # fmt: skip


class Encoder(nn.Module):
    """Two views of a sample become two embeddings; a scale is learned with them, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        x, y = (self.head(torch.tanh(self.second(torch.relu(self.first(view))))) for view in (x, y))
        return {"x": x, "y": y, "scale": self.log_scale.exp()}


def in_batch_negatives(output, _):
    return F.cross_entropy(output["scale"] * output["x"] @ output["y"].T, torch.arange(len(output["x"])))


def clip(output, _):
    logits = output["scale"] * F.normalize(output["x"]) @ F.normalize(output["y"]).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def redundancy_reduction(output, _):
    """Zbontar et al., 2021."""
    x, y = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in (output["x"], output["y"]))
    correlation = x.T @ y / len(x)
    return ((correlation - torch.eye(4)) ** 2).sum() * output["scale"]


def batch_hard_triplet(output, targets):
    distances = torch.cdist(output["x"], output["y"])
    is_same = targets["label"][:, None] == targets["label"]
    hardest = (distances * is_same).amax(1) - distances.masked_fill(is_same, 100.0).amin(1)
    return F.softplus(hardest + targets["margin"]).mean() * output["scale"]


LOSSES = [in_batch_negatives, clip, redundancy_reduction, batch_hard_triplet]


def batches(count=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = tuple(torch.randn(2, SAMPLES, 5, generator=generator, dtype=torch.float64))
        yield inputs, {"label": torch.randint(3, (SAMPLES,), generator=generator), "margin": 0.3}


def build():
    torch.manual_seed(0)
    return Encoder().double()


@cache
def train_plain(loss, make_optimizer=torch.optim.AdamW):
    model = build()
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    losses = []
    for inputs, targets in batches():
        optimizer.zero_grad()
        value = loss(model(*inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, params_of(model)


def train(loss, plan, num_microbatches, make_optimizer=torch.optim.AdamW, **options):
    model = build()
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    with cp.parallelize(
        model, optimizer, loss, strategy=plan, num_microbatches=num_microbatches, loss_reduction="batch", **options
    ) as step:
        losses = [step(inputs, targets) for inputs, targets in batches()]
    return losses, params_of(model)


def assert_same(actual, expected):
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    assert max_difference(actual[1], expected[1]) < 1e-12


@pytest.mark.long(quick=["data(2)-3", "zero2(2)-2"])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_a_contrastive_loss_is_that_of_the_whole_batch_under_every_plan_that_can(plan, num_microbatches):
    assert_same(train(clip, plan, num_microbatches), train_plain(clip))


@pytest.mark.long(
    quick=["gpipe(2)-4-redundancy_reduction", "solo-3-in_batch_negatives", "zero3(2)-2-batch_hard_triplet"]
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("plan", "num_microbatches"), [("solo", 3), ("data(4)", None), ("zero3(2)", 2), ("gpipe(2)", 4)]
)
def test_losses_that_compare_samples_are_those_of_the_whole_batch(plan, num_microbatches, loss):
    sgd = torch.optim.SGD  # AdamW divides gradients that are zero but for rounding by their size
    assert_same(train(loss, plan, num_microbatches, sgd), train_plain(loss, sgd))


@pytest.mark.long(quick=["tensor(2) * gpipe(2) * data(2)-2"])
@pytest.mark.parametrize(("plan", "num_microbatches"), [("tensor(2)", 3), ("tensor(2) * gpipe(2) * data(2)", 2)])
def test_the_ranks_of_each_tensor_parallel_shard_gather_outputs(plan, num_microbatches):
    assert max_difference(train_mlp(plan, num_microbatches), train_mlp("solo", 1, loss_reduction="mean")) < 1e-12


def pairs(output, _):
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def train_mlp(plan, num_microbatches, loss_reduction="batch"):
    pairs_of_widths = list(pairwise([6, 8, 6, 8, 6, 3]))
    model = build_seeded(
        lambda: nn.Sequential(*(layer for widths in pairs_of_widths for layer in (nn.Linear(*widths), nn.Tanh())))
    )
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), pairs, strategy=plan, num_microbatches=num_microbatches,
        loss_reduction=loss_reduction,
    ) as step:  # fmt: skip
        for _ in range(2):
            step(inputs, None)
    return params_of(model)


@pytest.mark.long(quick=["options2", "options1"])
@pytest.mark.parametrize("options", [{"passes": ("recompute",)}, {"passes": ()}, {"check_finite": "loss"}])
def test_other_options_change_nothing(options):
    assert_same(train(clip, "gpipe(2)", 2, **options), train_plain(clip))


@pytest.mark.parametrize(
    ("plan", "num_microbatches"),
    [("pipeline(2)", 4), ("pipeline(2) * data(2)", 2), ("zero_bubble(2)", 4), ("interleaved(2)", 4)],
)
def test_a_schedule_that_goes_backward_too_early_is_refused_with_those_that_do_not(plan, num_microbatches):
    with pytest.raises(
        PlanError,
        match=r"microbatch 0 backward before it runs microbatch \d+ forward; use .* gpipe, give num_microbatches=1",
    ):
        train_mlp(plan, num_microbatches)
    assert max_difference(train_mlp(plan, 1), train_mlp("solo", 1, loss_reduction="mean")) < 1e-12


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        ("pipedream(2)", "a batch begins before the update of the one before"),
        ("data(2, staleness=1)", "a batch begins before the update of the one before"),
        ("server(2, consistency=asp)", "that of all 2 ranks with outputs, but under .* rank 0 updates without"),
        ("data(2, sync_every=2)", "that of all 2 ranks with outputs, but under .* rank 0 updates without"),
        ("easgd(2)", "that of all 2 ranks with outputs, but under .* rank 0 updates without"),
    ],
)
def test_a_plan_whose_updates_are_not_of_the_whole_batch_is_refused(plan, fact):
    with pytest.raises(PlanError, match=f"{fact}.*; use solo, data, zero.* gpipe, or return a loss"):
        train_mlp(plan, None)


def test_a_rank_without_samples_takes_part():
    model, other = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(
        other, torch.optim.SGD(other.parameters(), lr=0.1), clip, strategy="data(4)", loss_reduction="batch"
    ) as step:
        for count in (SAMPLES, 3):
            inputs = tuple(view[:count] for view in next(batches())[0])
            optimizer.zero_grad()
            value = clip(model(*inputs), None)
            value.backward()
            optimizer.step()
            assert step(inputs, torch.zeros(count)) == pytest.approx(value.item(), rel=1e-12)
    assert max_difference(params_of(other), params_of(model)) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)", "gpipe(2)"])
def test_evaluation_measures_the_loss_of_whole_batches(plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = torch.utils.data.TensorDataset(torch.randn(20, 5).double(), torch.zeros(20))
    with cp.Trainer(
        model, loss=pairs, optimizer=partial(torch.optim.SGD, lr=0.1), strategy=plan, num_microbatches=2,
        loss_reduction="batch", progress="off",
    ) as trainer:  # fmt: skip
        found = trainer.evaluate(data, batch_size=8)["loss"]
    parts = [pairs(model(x), y).item() * len(x) for x, y in torch.utils.data.DataLoader(data, batch_size=8)]
    assert found == pytest.approx(sum(parts) / 20, rel=1e-12)


class Shapes(nn.Module):
    """Outputs whose form is an option."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(5, 4), form

    def forward(self, x):
        return self.form(self.layer(x))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda y: (y, y.mean(0)), r"tensors of the shapes \(4,\), \(4,\) from microbatches of 6, 6 samples"),
        (lambda y: (y, len(y)), "has the number 6, which is also its number of samples"),
        (lambda y: (y, y[0, 0].item()), "a value that is .* in one microbatch and differs in another"),
        (lambda y: list(y), "have a list of 6 tensors for 6 samples"),
    ],
)
def test_outputs_that_are_not_by_sample_are_refused(form, message):
    model = Shapes(form).double()
    with (
        cp.parallelize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda output, _: output[0].sum(), strategy="solo",
            num_microbatches=2, loss_reduction="batch",
        ) as step,
        pytest.raises(DataError, match=message),
    ):  # fmt: skip
        step(torch.randn(SAMPLES, 5).double(), torch.zeros(SAMPLES))


def test_microbatches_of_different_lengths_are_refused_with_a_remedy():
    with pytest.raises(DataError, match="pad them to one length"):
        merge_leaf([torch.zeros(2, 3), torch.zeros(2, 4)], [2, 2])


def test_named_dims_of_samples_are_refused():
    with pytest.raises(PlanError, match="which gathers outputs and targets along dim 0"):
        train(clip, "data(2)", None, shared=("y",))


def test_auto_is_refused_with_plans_to_name():
    with pytest.raises(PlanError, match=r"loss_reduction='batch'.*name the plan"):
        train(clip, "auto(2)", None)


def test_the_gathering_reads_as_written():
    plan = cp.Plan.parse("data(2)", num_microbatches=2)
    model = build()
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), clip, strategy=plan, loss_reduction="batch",
        share_params_on_host=False,
    ) as step:  # fmt: skip
        step(*next(batches()))
        compiled = step.local_ranks.compiled
    assert compiled is not None
    program = compiled.program
    assert cp.format_program(program).splitlines() == [
        "F0.0 F0.1 all_gather(out0)@0,1 B0.0 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0",
        "F0.2 F0.3 all_gather(out0)@0,1 B0.2 B0.3 all_reduce(grad0)@0,1 commit@0,1 U0",
    ]
    assert cp.parse_program(cp.format_program(program)) == program


def peak_bytes(function):
    """Return by how much the memory of tensors has grown at most during a call."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes, initial=0))


@pytest.mark.skipif(native().library is None, reason="the native part is not built")
def test_a_check_has_one_copy_of_the_output_at_a_time():
    """It had two: a half of the values with a half of these, and later with their log probabilities."""
    output, targets = torch.randn(256, 512, requires_grad=True), torch.arange(256)
    value = F.cross_entropy(output, targets).item()
    check = LossCheck(F.cross_entropy, is_sum=False)
    grown = peak_bytes(lambda: check.check(F.cross_entropy, 0, output, targets, value, 256, "the batch"))
    assert output.nbytes <= grown <= 1.2 * output.nbytes
