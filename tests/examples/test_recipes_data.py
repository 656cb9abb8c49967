"""The recipes of language models, classification, detection, carried state and streams train as plain PyTorch loops."""

import pytest
import torch
import torch.nn.functional as F

from tests.examples.recipe_parity import compare_recipe, load_recipe, worst_difference

RECIPES = {
    "causal_lm": (("--dropout", "0"), ("data(2)", "zero3(2)", "pipeline(2)", "tensor(2)")),
    "lora": (("--dropout", "0"), ("data(2)", "zero3(2)")),
    "sequence_classification": (("--dropout", "0"), ("data(2)", "pipeline(2)")),
    "encoder_decoder": (("--dropout", "0"), ("data(2)", "pipeline(2)")),
    "detection": ((), ("data(2)", "zero3(2)", "pipeline(2)")),
    "carried_state": ((), ("data(2)", "zero3(2)")),
    "streaming": (("--folder", "{folder}"), ("data(2)", "zero3(2)", "pipeline(2)", "tensor(2)")),
}
"""Arguments of each recipe that turn random numbers off, and plans of all those that it can use."""
PACKAGES = {"lora": "peft", "sequence_classification": "datasets"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft
@pytest.mark.parametrize("name", RECIPES)
def test_every_plan_trains_a_recipe_as_a_plain_loop_does(name, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    arguments, strategies = RECIPES[name]
    given = [argument.format(folder=tmp_path / "run") for argument in arguments]
    assert worst_difference(compare_recipe(name, *given, strategies=strategies)) < 1e-10
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_language_model_is_evaluated_saved_and_loaded_alike_under_two_plans(tmp_path):
    recipe, found = load_recipe("causal_lm"), {}
    for plan in ("solo", "data(2)"):
        found[plan] = recipe.main(["--strategy", plan, "--steps", "3", "--folder", str(tmp_path / plan)])
    assert found["data(2)"] == pytest.approx(found["solo"], rel=1e-5)
    assert found["solo"] < 257


def test_a_stream_is_continued_where_the_run_has_ended(tmp_path):
    recipe = load_recipe("streaming")
    whole = recipe.main(["--steps", "25", "--folder", str(tmp_path / "whole"), "--strategy", "solo"])
    first = recipe.main(["--steps", "13", "--folder", str(tmp_path / "parts"), "--strategy", "zero3(2)"])
    rest = recipe.main(["--steps", "25", "--folder", str(tmp_path / "parts"), "--strategy", "data(2)"])
    assert [*first, *rest] == pytest.approx(whole, rel=1e-5)


def test_a_state_that_is_carried_on_is_that_of_a_plain_loop():
    recipe = load_recipe("carried_state")
    torch.manual_seed(0)
    model, losses = recipe.CharLSTM(), []
    optimizer, state = torch.optim.Adam(model.parameters(), lr=3e-3), torch.zeros(2, 2, recipe.STREAMS, recipe.WIDTH)
    text = recipe.read_streams(4)
    for first in range(0, 4 * recipe.CHUNK, recipe.CHUNK):
        logits, *state = model(text[:, first : first + recipe.CHUNK], *(part.detach() for part in state))
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, first + 1 : first + recipe.CHUNK + 1].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert recipe.main(["--strategy", "data(2)", "--steps", "4"]) == pytest.approx(losses, rel=1e-5)
