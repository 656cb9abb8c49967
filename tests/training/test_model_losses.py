"""Losses that a model computes itself: exact where microbatches add up, else refused before the first step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.training.model_checks.model_loss_check import ModelLossCheck
from tests.training.trainers import max_difference, params_of

SAMPLES, LENGTH, TOKENS = 8, 6, 13
PLANS = [("solo", 4), ("data(2)", None), ("data(4)", 2), ("zero3(2)", None), ("pipeline(2)", 4)]
ACCEPT = {"cross_sample": "accept"}


class LanguageModel(nn.Module):
    """Returns its loss, and the logits, as the models of transformers do."""

    def __init__(self, how):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, 8), nn.Linear(8, TOKENS)
        self.how = how

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.layer(self.table(ids))))
        flat, targets = logits.flatten(0, 1), labels.flatten()
        if self.how == "index":
            loss = F.cross_entropy(flat, targets)
        else:
            mask = (targets >= 0).double()
            each = F.cross_entropy(flat, targets.clamp(min=0), reduction="none") * mask
            loss = each.sum() / mask.sum() if self.how == "mask" else each.mean()
        return {"loss": loss, "logits": logits}


class Experts(nn.Module):
    """Returns the load balance of its experts, which compares the samples of a batch."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        shares = F.one_hot(chances.argmax(-1), 3).double().mean(0)
        return self.head(torch.tanh(self.layer(x)) * chances), (shares * chances.mean(0)).sum()


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.second(hidden - hidden.mean(0))


def build(kind, *args):
    torch.manual_seed(0)
    return kind(*args).double()


def token_batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids, labels = torch.randint(TOKENS, (2, SAMPLES, LENGTH), generator=generator)
        lengths = torch.arange(SAMPLES) % LENGTH + 1
        yield {"ids": ids, "labels": labels.where(torch.arange(LENGTH) < lengths[:, None], -100)}, torch.zeros(SAMPLES)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(SAMPLES, 4, generator=generator).double(), torch.randint(3, (SAMPLES,), generator=generator)


def own(output, _):
    return output["loss"]


def train(model, loss, data, plan, num_microbatches, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, loss, strategy=plan, num_microbatches=num_microbatches, **options) as step:
        losses = [step(*batch) for batch in data]
    return losses, params_of(model)


@pytest.mark.long(quick=["index-data(2)-None", "samples-zero3(2)-None"])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
@pytest.mark.parametrize("how", ["index", "samples"])
def test_a_mean_that_adds_up_is_trained_exactly(plan, num_microbatches, how):
    expected = train(build(LanguageModel, how), own, token_batches(), "solo", 1)
    actual = train(build(LanguageModel, how), own, token_batches(), plan, num_microbatches)
    assert actual[0] == pytest.approx(expected[0], rel=1e-12)
    assert max_difference(actual[1], expected[1]) < 1e-12


@pytest.mark.long(quick=["data(4)-2", "data(2)-None", "solo-4"])
@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_a_mean_by_a_mask_is_refused_with_numbers(plan, num_microbatches):
    message = (
        r"the loss that LanguageModel computes from its samples is 2\.\d+ for \d samples, but 2\.\d+ for the first \d and "
        r"2\.\d+ for the other \d, of which the mean is 2\.\d+, .*cp.WeightedMean"
    )
    with pytest.raises(DataError, match=message):
        train(build(LanguageModel, "mask"), own, token_batches(), plan, num_microbatches)


@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_a_mean_by_a_mask_of_a_model_whose_head_is_zero_is_refused(plan, num_microbatches):
    """All tokens have one loss in the first step, so that values alone would be those of a mean over samples."""
    model = build(LanguageModel, "mask")
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(DataError, match=r"computes from its samples with weights changed for this check is .* tokens"):
        train(model, own, token_batches(), plan, num_microbatches)
    assert all(map(torch.equal, model.parameters(), before))


class OtherInTraining(nn.Module):
    """Returns a loss in training, and outputs for samples in evaluation, as models of detection do."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(4, 8), nn.Linear(8, 3), how

    def forward(self, x, labels):
        output = self.last(torch.tanh(self.first(x)))
        if not self.training:
            return output
        if self.how == "centred":
            output = output - output.mean(0)
        loss = F.mse_loss(output, labels)
        return {"loss": 2 * loss if self.how == "branch" and len(x) > 6 else loss}


def train_other_in_training(how, plan, num_microbatches):
    torch.manual_seed(0)
    model = OtherInTraining(how).double()
    batches = [({"x": torch.randn(8, 4).double(), "labels": torch.randn(8, 3).double()}, torch.zeros(8))] * 2
    return train(model, own, batches, plan, num_microbatches)


@pytest.mark.parametrize(("how", "message"), [("centred", "of which the mean is"), ("branch", "the number of samples")])
@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 4), ("data(4)", None), ("pipeline(2)", 4)], ids=str)
def test_a_loss_that_is_another_one_in_training_is_refused(plan, num_microbatches, how, message):
    """Only the loss of evaluation mode was looked at, and two microbatches together take no branch for the batch."""
    with pytest.raises(DataError, match=f"the loss that OtherInTraining computes .*{message}"):
        train_other_in_training(how, plan, num_microbatches)


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 4), ("data(4)", None), ("pipeline(2)", 4)], ids=str)
def test_a_loss_that_exists_in_training_only_is_exact(plan, num_microbatches):
    expected = train_other_in_training("mean", "solo", 1)
    assert train_other_in_training("mean", plan, num_microbatches)[0] == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_a_mean_by_a_mask_is_refused_in_the_step_with_the_first_padding(plan, num_microbatches):
    """Only the first batch was looked at."""
    model = build(LanguageModel, "mask")
    batch, zeros = next(token_batches())
    full = {**batch, "labels": batch["labels"].clamp(min=0)}
    with cp.parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), own, strategy=plan, num_microbatches=num_microbatches
    ) as step:
        for _ in range(2):
            step(full, zeros)
        with pytest.raises(DataError, match="the loss that LanguageModel computes from its samples is"):
            step(batch, zeros)
        step(full, zeros)


class Classifier(nn.Module):
    """Returns a mean that it computes in the dtype of its last layer, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x, labels):
        each = F.cross_entropy(self.head(torch.tanh(self.first(x))), labels, reduction="none")
        return {"loss": each.sum() / len(each)}


NARROW = [{"precision": "bf16"}, {"precision": "bf16(output=compute)"}, {"precision": "bf16(autocast=true)"}, {}]


def train_classifier(*, has_autocast, **options):
    torch.manual_seed(0)
    model, x, labels = Classifier(), torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=has_autocast),
        cp.parallelize(model, optimizer, own, strategy="data(2)", **options) as step,
    ):
        return [step({"x": x, "labels": labels}, torch.zeros(SAMPLES)) for _ in range(3)]


@pytest.mark.parametrize("options", NARROW, ids=str)
def test_a_mean_that_a_model_computes_in_bf16_is_not_taken_for_one_that_does_not_add_up(options):
    """The loss of the whole was rounded to another number than the mean of its parts', and was refused."""
    expected = train_classifier(has_autocast=False)
    assert train_classifier(has_autocast=not options, **options) == pytest.approx(expected, rel=0.01)


def test_a_mean_by_a_mask_is_refused_in_bf16_too():
    """Within what bf16 rounds, the mean of means may be another number than the mean."""
    torch.manual_seed(0)
    model, (batch, zeros) = build(LanguageModel, "mask").float(), next(token_batches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        cp.parallelize(model, optimizer, own, strategy="data(2)", precision="bf16") as step,
        pytest.raises(DataError, match="the loss that LanguageModel computes from its samples is"),
    ):
        step(batch, zeros)


class RoutedByANearTie(nn.Module):
    """Computes its own loss; a score that rounds otherwise for another number of samples chooses the layer."""

    def __init__(self, bound):
        super().__init__()
        self.first, self.second, self.bound = nn.Linear(4, 3), nn.Linear(4, 3), bound

    def forward(self, x, labels):
        score = x.sum(1, keepdim=True) * (1 + len(x) * torch.finfo(x.dtype).eps)
        output = torch.where(score > self.bound, self.first(x), 10 * self.second(x))
        return {"loss": F.cross_entropy(output, labels), "scale": self.first.bias.sum()}


def test_a_near_tie_that_rounding_turns_is_no_wrong_loss():
    """A later batch with values that none before had was refused: its halves took another layer than the whole."""
    x = torch.arange(1.0, 33).view(8, 4).double().sqrt()
    model = RoutedByANearTie(float(x[0].sum()) * (1 + 2.0**-50)).double()
    batch = {"x": x, "labels": torch.arange(8) % 3}
    with torch.no_grad():
        whole, *halves = (model(x[part], batch["labels"][part])["loss"] for part in map(slice, (0, 0, 4), (8, 4, 8)))
    assert abs(whole - sum(halves) / 2) > 0.01
    check = ModelLossCheck(model, own, "data(2)", is_sum=False)
    check.check(SlicedBatch((batch, torch.zeros(8)), ((0, 4), (4, 8))), [0, 1], has_weights=True)
    assert check.has_checked


class CastingInputs(nn.Module):
    """Runs under its casts only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, mask):
        each = self.layer(x.bfloat16()).square().mean(1) * mask
        return {"loss": each.sum() / mask.sum()}


def test_a_model_that_runs_with_its_casts_only_is_checked_with_them():
    x, mask = torch.arange(1.0, SAMPLES + 1)[:, None].expand(SAMPLES, 4), torch.ones(SAMPLES)
    mask[SAMPLES // 2 : -1] = 0
    model = CastingInputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        cp.parallelize(model, optimizer, own, strategy="data(2)", precision="bf16") as step,
        pytest.raises(DataError, match="the loss that CastingInputs computes from its samples is"),
    ):
        step({"x": x, "mask": mask}, mask)


def test_a_later_batch_is_not_checked_without_all_weights():
    """As in a pipeline of several processes: the model has zeros there, and a warning names it."""
    batch, zeros = next(token_batches())
    check = ModelLossCheck(build(LanguageModel, "mask"), own, "pipeline(2)", is_sum=False)
    full = {**batch, "labels": batch["labels"].clamp(min=0)}
    check.check(SlicedBatch((full, zeros), ((0, 4), (4, 8))), [0, 1], has_weights=True)
    with pytest.warns(UserWarning, match="LanguageModel have values that none before had, such as padding"):
        check.check(SlicedBatch((batch, zeros), ((0, 4), (4, 8))), [0, 1], has_weights=False)
    assert not check.is_watched


@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero3(2)"])
def test_the_remedy_for_a_mean_by_a_mask_is_exact(plan):
    def weighted(output, labels):
        mask = (labels >= 0).double()
        each = F.cross_entropy(output["logits"].transpose(1, 2), labels.clamp(min=0), reduction="none")
        return cp.WeightedMean((each * mask).sum(), mask.sum())

    data = [(inputs, inputs["labels"]) for inputs, _ in token_batches()]
    expected = train(build(LanguageModel, "mask"), own, token_batches(), "solo", 1)
    actual = train(build(LanguageModel, "samples"), weighted, data, plan, 2)
    assert max_difference(actual[1], expected[1]) < 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_a_load_balance_is_refused_unless_each_microbatch_may_be_a_batch(plan):
    def balanced(output, targets):
        return F.cross_entropy(output[0], targets) + output[1]

    with pytest.raises(DataError, match=r"the loss that Experts computes .*\(a load balance, a contrast\)"):
        train(build(Experts), balanced, batches(), plan, 2)
    train(build(Experts), balanced, batches(), plan, 2, **ACCEPT)
    train(build(Experts), balanced, batches(), "solo", 1)


@pytest.mark.parametrize(("plan", "num_microbatches"), PLANS, ids=str)
def test_an_output_that_depends_on_other_samples_is_refused(plan, num_microbatches):
    with pytest.raises(PlanError, match="the output of Centered for a sample depends on the other samples"):
        train(build(Centered), F.cross_entropy, batches(), plan, num_microbatches)


@pytest.mark.parametrize(("reduction", "plan"), [("sum", "data(2)"), ("mean", "solo"), ("sum", "pipeline(2)")])
def test_a_declared_sum_is_compared_with_a_sum(reduction, plan):
    def summed(output, _):
        return output["loss"] * len(output["logits"])

    if reduction == "sum":
        train(build(LanguageModel, "samples"), summed, token_batches(), plan, 2, loss_reduction="sum")
    else:
        with pytest.raises(DataError, match="do not add up"):
            train(build(LanguageModel, "samples"), summed, token_batches(), plan, 2)
