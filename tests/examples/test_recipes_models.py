"""The recipes of images, generators, recommendations, experts, graphs and policies train as plain PyTorch loops."""

from dataclasses import replace

import pytest
import torch

import counterpoint as cp
from counterpoint.training.parity import compare_plans
from counterpoint.training.recording import record_script
from tests.examples.recipe_parity import RECIPES, compare_recipe, load_recipe, worst_difference
from tests.training.several_models import PlainStep

SHARDED = ("data(2)", "zero3(2)", "pipeline(2)")
PLANS = {
    "clip": ("data(2)", "zero3(2)", "pipeline(2, schedule=gpipe)", "tensor(2)"),
    "dlrm": (*SHARDED, "tensor(2)", "bsp(2)"),
    "graph_network": SHARDED,
    "image_classification": ("data(2)", "zero3(2)"),
    "mixture_of_experts": SHARDED,
}
RANDOM = {"diffusion": SHARDED, "vae": (*SHARDED, "tensor(2)")}


@pytest.fixture
def double():
    """Models and data in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_trains_a_recipe_as_a_plain_loop_does(name):
    assert worst_difference(compare_recipe(name, strategies=PLANS[name])) < 1e-10


@pytest.mark.long(quick=["diffusion"])
@pytest.mark.parametrize("name", RANDOM)
def test_every_plan_draws_the_noise_of_one_rank(name):
    run = record_script(RECIPES / f"{name}.py", (), num_steps=2)
    plans = [replace(run.requested_plan, strategy=strategy) for strategy in RANDOM[name]]
    report = compare_plans(run, plans, dtype=torch.float64)
    assert report.reference == "one rank"
    assert not [plan.refusal for plan in report.plans if plan.refusal]
    assert worst_difference(report) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize(("name", "arguments"), [("gan", ("--steps", "3")), ("actor_critic", ("--rounds", "3"))])
def test_two_models_are_trained_as_in_a_plain_loop(name, arguments, double, monkeypatch):
    recipe = load_recipe(name)
    results = [recipe.main(["--strategy", plan, *arguments]) for plan in ("solo", *SHARDED)]
    monkeypatch.setattr(cp, "parallelize", PlainStep)
    expected = recipe.main(["--strategy", "", *arguments])
    for found in results:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.long
def test_the_images_are_learned_and_averaged_weights_are_the_same_under_two_plans():
    recipe = load_recipe("image_classification")
    found = {plan: recipe.main(["--strategy", plan, "--epochs", "1"]) for plan in ("solo", "data(2)")}
    assert found["solo"][0] == pytest.approx(found["data(2)"][0], rel=1e-3)
    assert found["solo"][1] > 0.4
    assert found["solo"][1] == pytest.approx(found["data(2)"][1], abs=0.02)
