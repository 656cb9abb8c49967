"""What may change between steps is compared in every commit: options, batches, autocast, attributes."""

import re
from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.errors import DataError
from counterpoint.fabric.local import LocalWorld
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.training.agreement.step_facts import ModuleModes, StepFacts, digest_values, may_change_settings, reads

X = torch.arange(24.0).view(12, 2)
Y = torch.arange(12)
RANGES = ((0, 6), (6, 12))


class Scaled(nn.Module):
    """Has a scale, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.calls, self.rank = nn.Linear(2, 2), 1.0, 0, 0


class Buffers:
    """Those of a model, of which one is given."""

    def __init__(self, value=0):
        self.value = value

    def digest_changes(self):
        yield self.value

    def describe(self):
        return [["mean of the model", f"a buffer with digest {self.value}"]]


class Rank:
    """What one rank is given."""

    def __init__(self):
        self.model = Scaled()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.1)
        self.facts = StepFacts(self.optimizer, {"the model": self.model}, Buffers(), nn.functional.mse_loss)
        self.batch = (X, Y)

    def begin_step(self):
        self.facts.begin_step(SlicedBatch(self.batch, RANGES))
        return self.facts


def set_option(key, value):
    return lambda one: one.optimizer.param_groups[0].update({key: value})


def set_batch(*batch):
    return lambda one: setattr(one, "batch", batch)


def set_scale(one):
    one.model.scale = 2.0


def set_buffer(one):
    one.facts.buffers = Buffers(1)


def freeze_statistics(one):
    one.model.layer.eval()


CHANGES = {
    "lr": (set_option("lr", 0.2), "lr of the optimizer's group 0 is 0.1 on rank 0, 0.2 on rank 1"),
    "lr as a tensor": (set_option("lr", torch.tensor(0.2)), "lr of the optimizer's group 0 is 0.1 on rank 0, float32"),
    "betas": (set_option("betas", (0.9, 0.9)), r"betas of the optimizer's group 0 is \(0.9, 0.999\) on rank 0, \(0.9, 0.9\)"),
    "maximize": (set_option("maximize", True), "maximize of the optimizer's group 0 is False on rank 0, True on rank 1"),
    "text": (set_option("note", "x"), "at index .* rank 0 has .*, rank 1 has note of the optimizer's group 0"),
    "attribute": (set_scale, "scale of the model is 1.0 on rank 0, 2.0 on rank 1"),
    "mode": (freeze_statistics, "layer.training of the model is True on rank 0, False on rank 1"),
    "buffer": (set_buffer, "mean of the model is a buffer with digest 0 on rank 0, a buffer with digest 1 on rank 1"),
    "content": (set_batch(X + 1, Y), r"the content of the batch is digest \w+ \w+ on rank 0, digest .*global batch"),
    "shape": (set_batch(X[:, :1], Y), r"the form of the batch is float32 \(12, 2\), .* on rank 0, float32 \(12, 1\), "),
    "dtype": (set_batch(X, Y.int()), r"the form of the batch is .*int64 \(12,\) .*on rank 0, .*int32"),
    "form": (set_batch({"x": X}, Y), r"the form of the batch is .* in tuple\[\*, \*\] on rank 0, .*tuple\[dict\[x\], \*\]"),
    "number": (set_batch((X, 0.5), Y), r"the form of the batch is .* on rank 0, float32 \(12, 2\), 0.5, int64"),
}  # fmt: skip


def compare(*ranks):
    """Return the error that the ranks raise where digests differ; they all raise the same."""
    facts = [one.begin_step() for one in ranks]
    if len({one.digest for one in facts if one.digest}) == 1:
        return ""

    def work(fabric):
        with pytest.raises(DataError) as caught:
            facts[fabric.rank].require_same(fabric, tuple(range(len(ranks))), 3)
        return str(caught.value)

    with LocalWorld(len(ranks)) as world:
        errors = world.run(work)
    assert len(set(errors)) == 1
    return errors[0]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_on_one_rank_is_named_in_the_step(what):
    change, text = CHANGES[what]
    one, other = Rank(), Rank()
    assert compare(one, other) == ""
    change(other)
    error = compare(one, other)
    assert error.startswith("the ranks were given different values for step 3: ")
    assert re.search(text, error)
    change(one)
    assert compare(one, other) == ""


def test_autocast_on_one_rank_is_named():
    one, other = Rank(), Rank()
    facts = one.begin_step()
    with torch.autocast("cpu", torch.bfloat16):
        assert other.begin_step().digest != facts.digest
        assert ["the autocast of the call", "cpu torch.bfloat16"] in other.facts.describe()


def test_what_steps_change_themselves_is_left_out_and_so_are_names_of_ranks():
    one, other = Rank(), Rank()
    for rank in (one, other):
        rank.begin_step()
        rank.model.calls += 1  # in a forward
        rank.facts.end_step()
    one.model.calls = 7
    one.model.rank = 1
    assert compare(one, other) == ""


def test_the_mode_of_a_whole_model_and_modes_that_forwards_set_are_left_out():
    """A step trains a model that was evaluated in the modes that it had."""
    one, other = Rank(), Rank()
    one.model.eval()
    assert compare(one, other) == ""
    one.model.train()
    one.begin_step()
    one.model.layer.eval()  # in a forward, on the rank that has the layer
    one.facts.end_step()
    assert compare(one, other) == ""


def test_a_rank_without_samples_has_nothing_to_compare():
    one, other = Rank(), Rank()
    set_option("lr", 0.2)(other)
    other.facts.begin_step(SlicedBatch((X[:0], Y[:0]), ((0, 0), (0, 0))))
    assert other.facts.digest == 0
    assert other.facts.describe() == []
    assert one.begin_step().digest


def test_the_digest_does_not_change_the_batch_and_reads_any_dtype():
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.uint8):
        one, other = Rank(), Rank()
        one.batch = other.batch = (X.to(dtype), Y.view(3, 4).t().reshape(12))
        assert compare(one, other) == ""
        other.batch = (X.to(dtype).logical_not().to(dtype), Y)
        assert compare(one, other)


def test_of_a_tensor_with_gaps_the_first_sample_is_read():
    rows = torch.arange(24.0).view(2, 12)
    assert digest_values(rows.t()) == digest_values(torch.tensor([[0.0, 12.0]]))


class Hooked(nn.Linear):
    """A layer of the user's own, whose code may read anything."""


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (nn.Linear(2, 2), "in_features", False),
        (nn.LayerNorm(2), "eps", True),
        (nn.Dropout(0.1), "p", True),
        (nn.Dropout(0.1), "inplace", True),
        (nn.BatchNorm1d(2), "momentum", True),
        (nn.BatchNorm1d(2), "track_running_stats", True),
        (nn.Conv2d(2, 2, 1), "groups", True),
        (nn.LSTM(2, 2), "batch_first", True),
        (nn.MultiheadAttention(2, 1), "num_heads", True),
        (Hooked(2, 2), "in_features", True),
    ],
)
def test_what_code_of_a_step_may_read_is_compared(module, name, expected):
    assert reads(module, name) is expected


def test_a_hook_or_a_method_of_its_own_may_read_anything():
    hooked, patched = nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    vars(patched)["forward"] = lambda x: x
    assert reads(hooked, "in_features")
    assert reads(patched, "in_features")


def with_hook():
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_method():
    layer = nn.Linear(2, 2)
    vars(layer)["forward"] = lambda x: x
    return layer


MSE = nn.functional.mse_loss


@pytest.mark.parametrize(
    ("loss", "module", "expected"),
    [
        (MSE, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()), False),
        (partial(nn.functional.cross_entropy, ignore_index=0), nn.Linear(2, 2), False),
        (nn.CrossEntropyLoss(), nn.MultiheadAttention(4, 2), False),
        (lambda x, y: MSE(x, y), nn.Linear(2, 2), True),
        (MSE, nn.Sequential(nn.Linear(2, 2), Scaled()), True),
        (MSE, nn.LSTM(2, 2), True),
        (MSE, with_hook(), True),
        (MSE, with_method(), True),
    ],
)
def test_only_code_of_torch_that_sets_no_attributes_is_known_to_leave_them(loss, module, expected):
    assert may_change_settings(loss, module) is expected


def test_modes_that_only_code_of_torch_could_read_are_compared_if_it_does():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.TransformerEncoderLayer(4, 1))
    modes = ModuleModes({"the model": layers}, has_own_code=False)
    of_layer = [f"2.{path}.training of the model".replace("..", ".") for path, _ in layers[2].named_modules()]
    assert modes.names == ["training of the model", "1.training of the model", *of_layer]
    assert len(ModuleModes({"the model": layers}).names) == len([*layers.modules()])
    layers[1].eval()
    assert len([*modes.find_changes()]) == 1
    layers[0].eval()
    assert len([*modes.find_changes()]) == 1
