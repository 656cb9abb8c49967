"""Models whose linear layers torchao has converted to products in fp8: as alone, or refused where scales are shared.

torchao is not a dependency of the tests, because transformers and peft import it wherever it is installed:
``pip install --no-deps torchao`` runs them.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import PlanError

float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")


def build(recipe):
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)]
    return float8.convert_to_float8_training(
        nn.Sequential(*layers), config=float8.Float8LinearConfig.from_recipe_name(recipe)
    )


def train(recipe, strategy, **options):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(64, 32, generator=draw), torch.randint(0, 16, (64,), generator=draw)
    model = build(recipe)
    with cp.parallelize(model, partial(optim.AdamW, lr=1e-2), F.cross_entropy, strategy=strategy, **options) as step:
        return [step(inputs, targets) for _ in range(4)]


def train_by_hand(recipe):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(64, 32, generator=draw), torch.randint(0, 16, (64,), generator=draw)
    model, losses = build(recipe), []
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(inputs), targets))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("solo", {"num_microbatches": 4}),
        ("data(2)", {}),
        ("data(2)", {"compile": "segments(backend=eager)"}),
        ("zero(2, level=1)", {}),
        ("zero(2, level=3)", {}),
        ("pipeline(2)", {}),
        ("pipeline(2, schedule=zero_bubble)", {}),
        ("server(2)", {}),
    ],
)
def test_scales_of_single_rows_make_the_losses_of_one_process(strategy, options):
    """The recipe scales rows of the layer's inputs and outputs, and computes the weight's gradient in high precision."""
    recipe = "rowwise_with_gw_hp"
    assert train(recipe, strategy, **options) == pytest.approx(train_by_hand(recipe), rel=2e-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("strategy", ["data(2)", "zero(2, level=3)", "pipeline(2)"])
def test_scales_over_all_samples_are_refused_unless_each_microbatch_is_a_batch(recipe, strategy):
    """Rows of ``rowwise`` are columns of the product for the weight's gradient, which contain all samples."""
    reason = "depends on the other samples" if recipe == "tensorwise" else "the autograd function matmul_with_hp_or"
    with pytest.raises(PlanError, match=reason):
        train(recipe, strategy)
    losses = train(recipe, strategy, cross_sample="accept")
    assert losses == pytest.approx(train_by_hand(recipe), rel=0.01)
    assert train(recipe, "solo") == pytest.approx(train_by_hand(recipe), rel=1e-6)


def test_a_plan_that_splits_layers_names_the_module():
    with pytest.raises(PlanError, match=r"in module '0' \(Float8Linear\).*a strategy that keeps the model whole"):
        train("rowwise_with_gw_hp", "tensor(2)")
