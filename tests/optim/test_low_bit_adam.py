"""Adam and AdamW with a state of 8 bits or in bf16: torch's update, a fraction of its memory, and state that is kept."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from counterpoint.data.digits import split_digits
from counterpoint.errors import DataError, PlanError
from counterpoint.optim import low_bit_adam
from counterpoint.optim.low_bit_adam import Adam8bit, AdamBf16, AdamW8bit, AdamWBf16

BETAS = (0.9, 0.95)
PAIRS = [(AdamW8bit, optim.AdamW), (Adam8bit, optim.Adam), (AdamWBf16, optim.AdamW), (AdamBf16, optim.Adam)]
LOW_BIT = [low_bit for low_bit, _ in PAIRS]
OPTIONS = {"lr": 0.01, "betas": BETAS, "weight_decay": 0.1}


def weights(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype))


def take_steps(param, optimizer, numbers):
    for number in numbers:
        draw = torch.Generator().manual_seed(number)
        param.grad = torch.randn(param.shape, generator=draw, dtype=torch.float64).to(param.dtype)
        optimizer.step()
    return param.detach().clone()


def train(make, num_steps, *shape, dtype=torch.float32):
    param = weights(*shape, dtype=dtype)
    return take_steps(param, make([param]), range(num_steps))


@pytest.mark.parametrize(("low_bit", "full"), PAIRS[:2])
def test_small_parameters_have_a_wide_state_and_updates_of_torch(low_bit, full):
    mine, theirs = (train(partial(kind, **OPTIONS), 6, 63, 65, dtype=torch.float64) for kind in (low_bit, full))
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("low_bit", "full"), PAIRS)
def test_the_first_update_is_that_of_torch_for_only_what_is_stored_is_narrower(low_bit, full):
    mine, theirs = (train(partial(kind, **OPTIONS), 1, 70, 65, dtype=torch.float64) for kind in (low_bit, full))
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("low_bit", "full"), PAIRS)
def test_later_updates_differ_by_what_was_lost_and_little_more(low_bit, full):
    mine, theirs = (train(partial(kind, **OPTIONS), 20, 70, 65) for kind in (low_bit, full))
    moved = (theirs - weights(70, 65)).norm()
    assert 0 < (mine - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize(("low_bit", "num_bytes"), [(AdamW8bit, 2 * (1 + 4 / 256)), (AdamWBf16, 4)])
def test_the_state_has_as_many_bytes_per_parameter_as_documented(low_bit, num_bytes):
    param = weights(256, 256)
    optimizer = low_bit([param], betas=BETAS)
    take_steps(param, optimizer, range(2))
    tensors = [value for key, value in optimizer.state[param].items() if key != "step"]
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == num_bytes * param.numel()


def test_a_group_may_keep_its_state_in_float32():
    params = [weights(64, 64), weights(64, 64)]
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "min_8bit_size": 10**9}]
    optimizer = AdamW8bit(groups)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [optimizer.state[param].keys() & {"exp_avg", "exp_avg_codes"} for param in params] == [
        {"exp_avg_codes"}, {"exp_avg"}
    ]  # fmt: skip
    assert optimizer.split_size == 4096


@pytest.mark.parametrize(("min_8bit_size", "split_size"), [(1, 512), (512, 512), (513, 768), (4096, 4096)])
def test_parameters_may_be_split_between_blocks_into_parts_that_are_quantized(min_8bit_size, split_size):
    assert AdamW8bit([weights(64, 64)], min_8bit_size=min_8bit_size).split_size == split_size


@pytest.mark.parametrize("low_bit", LOW_BIT)
def test_the_size_of_the_ranges_that_are_updated_at_once_changes_no_bit(low_bit, monkeypatch):
    whole = train(partial(low_bit, **OPTIONS), 4, 70, 65)
    monkeypatch.setattr(low_bit_adam, "RANGE_SIZE", 512)
    assert torch.equal(train(partial(low_bit, **OPTIONS), 4, 70, 65), whole)


def test_blocks_are_counted_in_the_order_of_dims_whatever_the_memory_format():
    plain, strided = weights(32, 8, 4, 4), weights(32, 8, 4, 4)
    strided.data = strided.data.to(memory_format=torch.channels_last)
    results = [take_steps(param, AdamW8bit([param]), range(3)) for param in (plain, strided)]
    assert torch.equal(*results)
    assert strided.stride() != plain.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("low_bit", [AdamW8bit, AdamWBf16])
def test_training_continues_from_a_saved_state_with_the_same_bits(low_bit, dtype):
    param = weights(70, 65, dtype=dtype)
    optimizer = low_bit([param], betas=BETAS)
    take_steps(param, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = nn.Parameter(param.detach().clone())
    other = low_bit([loaded], betas=BETAS)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(take_steps(loaded, other, range(3, 6)), take_steps(param, optimizer, range(3, 6)))


def test_a_copy_trains_as_the_original():
    param = weights(70, 65)
    optimizer = AdamW8bit([param])
    take_steps(param, optimizer, range(3))
    other, copied = copy.deepcopy((param, optimizer))
    assert torch.equal(take_steps(other, copied, range(3, 6)), take_steps(param, optimizer, range(3, 6)))


@pytest.mark.parametrize("low_bit", [AdamW8bit, AdamWBf16])
def test_training_continues_from_a_state_of_torch(low_bit):
    param, loaded = weights(70, 65), weights(70, 65)
    optimizer, other = optim.AdamW([param], betas=BETAS), low_bit([loaded], betas=BETAS)
    take_steps(param, optimizer, range(3))
    loaded.data = param.detach().clone()
    other.load_state_dict(optimizer.state_dict())
    mine, theirs = take_steps(loaded, other, [3]), take_steps(param, optimizer, [3])
    assert (mine - theirs).abs().max() < 2e-4
    assert {value.dtype for key, value in other.state[loaded].items() if key != "step"} <= {
        torch.uint8, torch.float32 if low_bit is AdamW8bit else torch.bfloat16
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low_bit", "options", "text"),
    [
        (AdamW8bit, {"maximize": True}, "AdamW8bit was given maximize=True, which it does not have"),
        (AdamWBf16, {"betas": (0.9, 0.999)}, r"betas=\(0.9, 0.999\) of AdamWBf16 would change its state by"),
    ],
)
def test_a_state_with_options_that_it_does_not_have_is_refused(low_bit, options, text):
    param = weights(2, 2)
    saved = optim.AdamW([param], **options).state_dict()
    with pytest.raises(PlanError, match=text):
        low_bit([param], betas=BETAS).load_state_dict(saved)


def test_a_state_of_codes_is_not_mistaken_for_one_of_torch():
    param = weights(70, 65)
    optimizer = AdamW8bit([param])
    take_steps(param, optimizer, range(1))
    other = optim.AdamW([param])
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(KeyError, match="exp_avg"):
        other.step()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (partial(AdamW8bit, lr=-1.0), "lr=-1.0 is out of range; give a finite number, 0 or more"),
        (partial(AdamW8bit, betas=(0.9, 1.0)), "beta2=1.0 is not a decay factor; give a number from 0 to below 1"),
        (partial(AdamW8bit, amsgrad=True), "AdamW8bit was given amsgrad=True, which it .* use Adam or AdamW of torch"),
        (partial(AdamW8bit, min_8bit_size=0), "min_8bit_size=0 is not a count; give a whole number, 1 or more"),
        (partial(AdamBf16, betas=(0.9, 0.999)), r"lost when it is rounded to bf16; give .* up to 0.99609, such as"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, text):
    with pytest.raises(PlanError, match=text):
        make([weights(2, 2)])


def test_parameters_that_are_not_real_are_refused():
    with pytest.raises(PlanError, match=r"a parameter of the shape \(3,\) in torch.complex64; .* give the others to a"):
        AdamW8bit([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(DataError, match=r"parameter \(10, 4\) is sparse, but AdamW8bit updates .* sparse=False"):
        AdamW8bit(table.parameters()).step()


def test_a_mean_in_bf16_decays_with_the_largest_decay_factor_and_not_with_a_larger_one():
    means = torch.arange(128, 256).bfloat16() / 128  # all numbers in bf16 from 1 to 2
    decayed, kept = ((means * beta).bfloat16() for beta in (torch.tensor(low_bit_adam.MAX_BF16_BETA), 0.998))
    assert (decayed < means).all()
    assert (kept == means).any()


def train_digits(make):
    """Return the mean loss of the last steps of an epoch."""
    digits, _ = split_digits()
    samples = [digits[number] for number in range(len(digits))]
    inputs, targets = torch.stack([pixels for pixels, _ in samples]).flatten(1), torch.tensor([y for _, y in samples])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer, losses = make(model.parameters(), lr=5e-3), []
    for start in range(0, 1408, 32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[start : start + 32]), targets[start : start + 32])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize(("low_bit", "full"), [PAIRS[0], PAIRS[2]])
def test_a_model_trains_to_within_two_percent_of_the_loss_of_torch(low_bit, full):
    mine, theirs = (train_digits(partial(kind, betas=BETAS)) for kind in (low_bit, full))
    assert theirs < 1.0
    assert mine == pytest.approx(theirs, rel=0.02)
    assert mine != theirs
