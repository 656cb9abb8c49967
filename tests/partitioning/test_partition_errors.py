"""Errors of models that cannot be partitioned: location, reason and remedy."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from counterpoint.errors import PlanError
from counterpoint.partitioning.partition import partition_model
from counterpoint.partitioning.tracing.traced import TracedPartition
from tests.partitioning.models import draws_in_forward, long_skip, perceptron
from tests.partitioning.segment_runs import clone_tensors, seed


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return x


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gates = nn.ModuleList([Gate()])

    def forward(self, x):
        return self.gates[0](self.first(x))


def test_a_branch_on_values_is_named_with_its_module_and_line():
    with pytest.raises(PlanError) as refusal:
        partition_model(Branching(), (torch.randn(3, 4),), granularity="blocks")
    text = str(refusal.value)
    assert "stopped in module 'gates.0' (Gate)" in text
    assert "test_partition_errors.py" in text
    assert "'if x.sum() > 0:'" in text
    assert "train it with a strategy that keeps the model whole (data, zero of level 1 or 2, server)" in text


def test_a_model_that_cannot_be_split_runs_whole():
    model, inputs = Branching(), (torch.randn(3, 4),)
    partitioned = partition_model(model, inputs, granularity="whole")
    (output,) = partitioned.segment(0, 1, training=True)(inputs, *clone_tensors(model), seed)
    assert torch.equal(output, model(*inputs))


def test_the_model_stays_without_hooks_after_a_refusal():
    model = Branching()
    with pytest.raises(PlanError):
        partition_model(model, (torch.randn(3, 4),), granularity="blocks")
    assert not [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]


@pytest.mark.parametrize("granularity", ["whole", "blocks", "tensor_parallel"])
def test_a_missing_input_is_named(granularity):
    model, (x, _) = long_skip()
    with pytest.raises(PlanError, match=r"missing a required argument: 'late'.* give all inputs of forward"):
        partition_model(model, (x,), granularity=granularity)


@pytest.mark.parametrize("granularity", ["whole", "blocks", "tensor_parallel"])
def test_a_model_without_parameters_is_refused(granularity):
    with pytest.raises(PlanError, match=r"ReLU has no parameters, .* register"):
        partition_model(nn.ReLU(), (torch.randn(3, 4),), granularity=granularity)


@pytest.mark.parametrize("granularity", ["whole", "blocks", "tensor_parallel"])
def test_an_error_of_the_model_itself_is_raised_unchanged(granularity):
    model, _ = draws_in_forward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as mistake:
        partition_model(model, (torch.randn(4, 7),), granularity=granularity)
    assert not isinstance(mistake.value, PlanError)


def test_a_model_that_runs_other_modules_in_evaluation_is_refused_there():
    class Early(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for layer in self.layers if self.training else self.layers[:1]:
                x = layer(x)
            return x

    partitioned = TracedPartition(Early(), (torch.randn(3, 4),))
    with pytest.raises(PlanError, match=r"does not run layers\.1, layers\.2 in this mode"):
        partitioned.segment(0, 1, training=False)


def test_a_whole_model_has_one_layer():
    partitioned = partition_model(*perceptron(), granularity="whole")
    with pytest.raises(PlanError, match=r"which has only layer 0; ask for segment\(0, 1\)"):
        partitioned.segment(0, 2, training=True)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"layer": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4, momentum=None)})

    def forward(self, x):
        return self.parts["norm"](self.parts["layer"](x)) + x


def test_batch_norm_that_averages_over_all_batches_is_named_with_the_way_out():
    with pytest.raises(
        PlanError, match=r"^module 'parts\.norm' \(BatchNorm1d\) has momentum=None, .* as momentum=0\.1"
    ):
        partition_model(Normed(), (torch.randn(3, 4),), granularity="blocks")


class Masked(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.options = options

    def forward(self, x):
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(5), **self.options)


def test_a_mask_whose_values_torch_looks_at_is_to_be_given_by_is_causal():
    x = torch.randn(3, 5, 8)
    with pytest.raises(
        PlanError, match=r"in module 'encoder' .*: torch compares .* pass is_causal=True or is_causal=F"
    ):
        partition_model(Masked(), (x,), granularity="blocks")
    assert partition_model(Masked(is_causal=True), (x,), granularity="blocks").spec.num_blocks > 1


@pytest.mark.long
def test_what_torch_logs_while_it_traces_is_not_for_the_terminal():
    code = (
        "import torch\n"
        "from counterpoint.partitioning.partition import partition_model\n"
        "from tests.partitioning.test_partition_errors import Branching\n"
        "try: partition_model(Branching(), (torch.randn(3, 4),), granularity='blocks')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "import logging; logging.getLogger('torch.fx.experimental.symbolic_shapes').warning('still heard')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout == "PlanError\n"
    assert "Unable to find user code" not in ran.stderr
    assert "still heard" in ran.stderr


class Dispatch(nn.Module):
    """Computes only what a mask selects, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        (chosen,) = torch.where(x.sum(1) > 0)
        return x.index_add(0, chosen, self.layer(x[chosen]))


def test_a_size_that_depends_on_values_is_refused():
    with pytest.raises(PlanError, match=r"^the result of aten.where\S* in Dispatch has a size that depends on values"):
        partition_model(Dispatch(), (torch.randn(6, 4),), granularity="blocks")


class Differentiates(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = self.second(torch.tanh(self.first(x)))
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


class MapsSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return torch.vmap(lambda sample: self.second(torch.tanh(self.first(sample))))(x)


class CreatesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(4))
        return self.layer(x * self.scale)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Differentiates(), "Differentiates differentiates in its forward (torch.autograd), but a model is split along"),
        (
            MapsSamples(),
            "MapsSamples computes with a transform of torch.func, such as vmap, but a model is split along",
        ),
        (
            CreatesParameter(),
            "the forward of CreatesParameter creates the parameter scale, which the optimizer does not",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_trace_cannot_have_is_named_and_leaves_the_model_as_it_was(model, text):
    """These were errors of torch's about fake tensors, or named another cause."""
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(PlanError) as refusal:
        partition_model(
            model,
            (torch.randn(3, 4),),
            granularity="blocks"
            if isinstance(model, CreatesParameter | Differentiates | MapsSamples)
            else "tensor_parallel",
        )
    assert str(refusal.value).startswith(text)
    assert [name for name, _ in model.named_parameters()] == names
