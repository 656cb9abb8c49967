"""A step whose decision stays on the device: errors come a step later, with the step's own number and no change."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import counterpoint as cp
from counterpoint.errors import DataError
from counterpoint.runtime.commit.device_commit import first_nonfinite
from counterpoint.testing.device_survey import batches, build, make_step
from counterpoint.testing.stand_in_accelerator import StandInAccelerator
from counterpoint.testing.stand_in_device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore")

PLANS = ("solo", "data(2)", "zero(2, level=1)", "zero(2, level=3)", "pipeline(2) + recompute", "pipeline(2) * data(2)")


@pytest.fixture(params=["stand_in", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device that is not the host: the stand-in one, or a GPU where there is one."""
    return StandInAccelerator() if request.param == "stand_in" else request.param


@pytest.mark.parametrize(
    ("values", "key"),
    [({2: 1.0, 1: math.nan, 0: math.nan}, 1), ({0: 1.0, 1: math.inf, 2: math.nan}, 1), ({3: 1.0}, -1)],
)
def test_the_first_value_that_is_not_finite_is_the_first_given(values, key):
    pairs = [(micro, torch.tensor(value).to(DEVICE.device)) for micro, value in values.items()]
    assert float(first_nonfinite(pairs, StandInAccelerator()).cpu()) == key


def samples(count):
    """Return the batches of some steps."""
    return list(itertools.islice(itertools.cycle(list(batches("mlp"))), count))


def spoil(batch):
    """Return a batch with an input that is nan."""
    inputs = batch[0].clone()
    inputs[-1, 2] = math.nan
    return inputs, batch[1]


def take(step, batches):
    """Take steps on batches."""
    for batch in batches:
        step(*batch)


def state_of(step, model):
    """Return weights and optimizer state, in host memory."""
    step.export_weights()
    state = step.full_optimizer_state()["state"]
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return weights, {
        f"{index}.{key}": torch.as_tensor(value).cpu().clone()
        for index, own in state.items()
        for key, value in own.items()
    }


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.long(quick=["stand_in-zero(2, level=1)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_nan_is_named_with_its_own_step_and_changes_no_bit(plan, device):
    step, model = make_step("mlp", plan, device)
    first, second, third, bad, good, last = samples(6)
    with step:
        for batch in (first, second, third):
            step(*batch)
        before = copy.deepcopy(state_of(step, model))
        loss = step(*spoil(bad))
        with pytest.raises(
            DataError,
            match=r"step 3 cannot be applied: the loss of microbatch \d on rank \d is nan",
        ):
            step(*good)
        assert math.isnan(loss)
        assert_equal(state_of(step, model), before)
        assert not math.isnan(step(*last))


@pytest.mark.long(quick=["stand_in-close"])
@pytest.mark.parametrize("end", ["export_weights", "full_optimizer_state", "close"])
def test_the_error_of_the_last_step_is_raised_before_anything_is_read(end, device):
    step, model = make_step("mlp", "zero(2, level=3)", device)
    for batch in samples(3):
        step(*batch)
    before = {name: value.detach().cpu().clone() for name, value in step.export_weights().state_dict().items()}
    step(*spoil(samples(4)[3]))
    with pytest.raises(DataError, match="step 3 cannot be applied"):
        getattr(step, end)()
    step.close()
    assert all(torch.equal(value.detach().cpu(), before[name]) for name, value in model.state_dict().items())


@pytest.mark.long(quick=["stand_in-zero(2, level=3)"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_skipped_step_is_as_on_the_cpu(plan, device):
    def train(device):
        step, model = make_step("mlp", plan, device, nonfinite="skip", clip_norm=0.1)
        with step:
            losses, states = [], []
            for number, batch in enumerate(samples(8)):
                losses.append(step(*(spoil(batch) if number in {3, 4, 6} else batch)))
                if number in {2, 4}:
                    states.append(state_of(step, model))
            assert_equal(*states)
            return [float(loss) for loss in losses], state_of(step, model)

    (losses, state), (expected_losses, expected) = train(device), train("cpu")
    assert [math.isnan(loss) for loss in losses] == [number in {3, 4, 6} for number in range(8)]
    assert losses == pytest.approx(expected_losses, rel=1e-12, nan_ok=True)
    for one, other in zip(state, expected, strict=True):
        assert all(torch.allclose(value, other[name], rtol=1e-11, atol=1e-14) for name, value in one.items())


@pytest.mark.long(quick=["stand_in-skip-zero(2, level=1)"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_dynamic_loss_scale_is_that_of_the_cpu(plan, nonfinite, device):
    """Two steps have gradients that are not finite, one of them right after the other; one has another loss."""

    def train(device):
        rule = cp.DynamicLossScale(init_scale=64.0, growth_interval=2, hysteresis=2)
        step, model = make_step("mlp", plan, device, nonfinite=nonfinite, loss_scale=rule, clip_norm=0.1)
        with step:
            losses = []
            for number, batch in enumerate(samples(12)):
                inputs, targets = batch
                losses.append(step(inputs * 1e160 if number in {4, 5, 9} else inputs, targets))
            state = state_of(step, model)
            scales = [rank.interpreter.state.loss_scaler.state() for rank in step.local_ranks.ranks.values()]
            assert len(set(scales)) == 1
            return [float(loss) for loss in losses], scales[0], state

    (losses, scale, state), (expected_losses, expected_scale, expected) = train(device), train("cpu")
    assert scale == expected_scale
    assert losses == pytest.approx(expected_losses, rel=1e-12, nan_ok=True)
    for one, other in zip(state, expected, strict=True):
        assert all(torch.allclose(value, other[name], rtol=1e-11, atol=1e-14) for name, value in one.items())


@pytest.mark.long(quick=["stand_in-data(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=3)"])
def test_a_sum_that_overflows_in_a_narrower_dtype_is_found_as_on_the_cpu(plan, device):
    def train(device):
        rule = cp.DynamicLossScale(init_scale=2.0**24)
        step, model = make_step("mlp", plan, device, loss_scale=rule, precision="fp32(reduce=fp16)")
        with step:
            losses = [float(step(*batch)) for batch in samples(16)]
            state = state_of(step, model)
            return losses, {rank.interpreter.state.loss_scaler.scale for rank in step.local_ranks.ranks.values()}, state

    (losses, scales, state), (expected_losses, expected_scales, expected) = train(device), train("cpu")
    assert scales == expected_scales
    assert max(scales) < 2.0**23
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    for one, other in zip(state, expected, strict=True):
        assert all(torch.allclose(value, other[name], rtol=1e-2, atol=1e-3) for name, value in one.items())


@pytest.mark.long
def test_too_many_skipped_steps_end_the_run_at_the_same_step_and_weights(device):
    def train(device):
        step, _ = make_step("mlp", "data(2)", device, nonfinite="skip")
        good, *bad = samples(26)
        with step:
            for _ in range(3):
                step(*good)
            with pytest.raises(DataError) as found:
                take(step, [spoil(batch) for batch in bad])
            return str(found.value), {name: value.cpu() for name, value in step.export_weights().state_dict().items()}

    (text, weights), (expected_text, expected) = train(device), train("cpu")
    assert text == expected_text
    assert text.startswith("21 steps in a row were skipped, the last one, step 23,")
    assert all(torch.allclose(value, expected[name], rtol=1e-12) for name, value in weights.items())


def test_a_gradient_that_is_not_finite_is_named(device):
    def train(device):
        step, _ = make_step("mlp", "data(2)", device)
        with step:
            take(step, samples(3))
            for rank in step.local_ranks.ranks.values():
                rank.interpreter.store.params["2.weight"].register_hook(lambda grad: grad * math.inf)
            with pytest.raises(DataError) as found:
                take(step, samples(2))
            return str(found.value)

    assert train(device) == train("cpu")


def test_a_failure_of_the_next_step_does_not_hide_a_nan(device):
    step, _ = make_step("mlp", "data(2)", device)
    with step:
        for batch in samples(3):
            step(*batch)
        step(*spoil(samples(1)[0]))
        with pytest.raises(Exception, match=r"shape|size|dim"):
            step(torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(DataError, match="step 3 cannot be applied"):
            step.export_weights()


@pytest.mark.long
def test_state_that_was_loaded_is_continued(device):
    def train(device):
        step, _ = make_step("mlp", "zero(2, level=1)", device)
        with step:
            losses = [step(*batch) for batch in samples(4)]
            saved = copy.deepcopy(step.optimizer.state_dict())
            losses += [step(*batch) for batch in samples(1)]
            step.optimizer.load_state_dict(saved)
            losses += [step(*batch) for batch in samples(4)]
        return [float(loss) for loss in losses], saved["state"][0]["step"]

    (losses, count), (expected, _) = train(device), train("cpu")
    assert losses == pytest.approx(expected, rel=1e-12)
    assert (float(count), count.device.type) == (4.0, "cpu")


def test_no_wait_between_streams_is_missing(device):
    if not isinstance(device, StandInAccelerator):
        pytest.skip("streams are checked on the stand-in device")
    step, _ = make_step("mlp", "data(2)", device, clip_norm=0.5)
    with step:
        for batch in samples(5):
            step(*batch)
    DEVICE.require_no_races()


def weighted_loss(outputs, targets):
    """Return a mean over the targets that count, of which microbatches have different numbers."""
    return F.cross_entropy(outputs, targets, ignore_index=0)


def summed_loss(outputs, targets):
    """Return a sum over samples."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def loss_of_parts(outputs, targets):
    """Return a loss that is a dict."""
    return {"loss": F.cross_entropy(outputs, targets), "norm": outputs.square().mean(1).mean()}


SGD = partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@pytest.mark.long(quick=["stand_in-optimizer3-cross_entropy-options3"])
@pytest.mark.parametrize(
    ("optimizer", "loss", "options"),
    [
        (SGD, weighted_loss, {"clip_norm": 0.2}),
        (SGD, summed_loss, {"loss_reduction": "sum", "clip_norm": 0.2}),
        (partial(optim.Adam, lr=0.01, amsgrad=True), weighted_loss, {"clip_value": 0.01}),
        (partial(optim.AdamW, lr=0.01, maximize=True), F.cross_entropy, {"unused_parameters": "zero"}),
        (partial(optim.AdamW, lr=0.01, foreach=True), F.cross_entropy, {}),
        (partial(optim.RMSprop, lr=0.01), F.cross_entropy, {}),
        (SGD, loss_of_parts, {}),
    ],
)
def test_every_kind_of_loss_and_optimizer_has_the_numbers_of_the_cpu(optimizer, loss, options, device):
    def train(device):
        model = build("mlp")
        step = cp.parallelize(
            model, optimizer(model.parameters()), loss, strategy="data(2)", num_microbatches=2, nonfinite="skip",
            device=device, **options,
        )  # fmt: skip
        with step:
            scheduler = optim.lr_scheduler.ExponentialLR(step.optimizer, 0.9)
            losses = []
            for number, batch in enumerate(samples(7)):
                losses.append(step(*(spoil(batch) if number == 4 else batch)))
                scheduler.step()
        return [float(loss) for loss in losses], [param.detach().cpu() for param in model.parameters()]

    (losses, weights), (expected_losses, expected) = train(device), train("cpu")
    assert losses == pytest.approx(expected_losses, rel=1e-11, nan_ok=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-13) for one, other in zip(weights, expected, strict=True))
