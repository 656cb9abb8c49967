"""What scripts do besides forward, backward and step: it has the plain loop's numbers, or is an error with a remedy."""

from typing import Any

import pytest
import torch
from torch import nn

import counterpoint as cp
import counterpoint.compat.deepspeed as deepspeed
from tests.compat.deepspeed import training_scenarios as training
from tests.compat.deepspeed.rank_processes import once_on_ranks

on_two_ranks = [pytest.mark.process, pytest.mark.timeout(120)]


def at_stages(names):
    return pytest.mark.parametrize(("name", "stage"), [(name, stage) for name in names for stage in training.STAGES])


CHANGE_ERRORS = {
    "unfrozen": "frozen.weight has requires_grad=True, and had False in initialize()",
    "frozen": "last.weight has requires_grad=False, and had True in initialize()",
    "group added": "are not those of initialize(): another tensor was added; call initialize again",
    "rates": "rank 1 has param_groups[0].lr=1.05 in its optimizer, and rank 0 has 0.05; set the same",
    "other shape": "unused.weight was set to torch.float64 of shape (2, 2)",
}
INITIALIZE_ERRORS = {
    "shared memory": "unused.weight and last.weight are two tensors in the same memory",
    "expanded": "ones was made by expand(), and its elements share memory",
    "Adagrad": "from its constructor (Adagrad), and ranks have shards at stage 1; use stage 0",
    "subclass": "OwnAdamW may compute norms or more of whole parameters",
    "rates": "rank 1 has optimizer.params={'lr': 1.1}, optimizer.param_groups[0].lr=1.1, and rank 0 has",
    "clipping": "rank 1 has gradient_clipping=1.5, and rank 0 has gradient_clipping=0.5; give all ranks the same",
    "stage": "rank 1 has zero_optimization.stage=1, and rank 0 has zero_optimization.stage=0",
    "accumulation": "gradient_accumulation_steps=2, and rank 0 has train_batch_size=6, gradient_accumulation_steps=1",
    "classes": "rank 1 has optimizer=AdamW",
    "groups": "rank 1 has optimizer.param_groups[0].lr=1.1, and rank 0 has optimizer.param_groups[0].lr=0.1",
}


CHANGED = [(name, stage) for name in CHANGE_ERRORS if name != "other shape" for stage in training.STAGES]


class TestOnTwoRanks:
    pytestmark = on_two_ranks

    @at_stages(["probe", "data"])
    def test_gradients_that_are_dropped_and_data_that_is_replaced_change_nothing(self, name, stage):
        expected, _ = training.alone(2, make=training.adamw)
        for found in once_on_ranks(training.changed_by_scripts):
            assert found[f"{name} at stage {stage}"] == pytest.approx(expected, rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize("stage", training.STAGES)
    def test_two_engines_train_one_model_as_two_optimizers_do(self, stage):
        expected = training.train_two_optimizers(2)
        for found in once_on_ranks(training.changed_by_scripts):
            assert found[f"shared at stage {stage}"] == pytest.approx(expected, rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize(("name", "stage"), [*CHANGED, ("other shape", 1), ("other shape", 2)])
    def test_a_change_of_what_is_trained_is_an_error_that_names_it(self, name, stage):
        for found in once_on_ranks(training.changed_by_scripts):
            assert CHANGE_ERRORS[name] in found[f"{name} at stage {stage}"]

    @pytest.mark.parametrize("stage", [0, 1])
    def test_gradients_that_the_script_changes_are_an_error(self, stage):
        for found in once_on_ranks(training.changed_by_scripts):
            text = found[f"gradients at stage {stage}"]
            assert "the gradient of first.weight was changed outside of backward()" in text
            assert "set gradient_clipping" in text

    @pytest.mark.parametrize("stage", training.STAGES)
    def test_weights_that_one_rank_sets_inside_its_gather_are_sent_to_all(self, stage):
        expected = training.set_in_plain_loop(2)
        for found in once_on_ranks(training.weights_set):
            assert found[f"sent at stage {stage}"] == pytest.approx(expected, rel=1e-12, abs=1e-12)

    @pytest.mark.parametrize("stage", training.STAGES)
    def test_weights_that_one_rank_sets_for_itself_are_an_error_that_names_them(self, stage):
        for found in once_on_ranks(training.weights_set):
            kept, outside = found[f"kept at stage {stage}"], found[f"outside at stage {stage}"]
            assert "rank 1 has other numbers in frozen.weight, last.bias than rank 0" in kept
            assert "rank 1 has other numbers in last.weight than rank 0: the script has set weights" in outside
            assert "modifier_rank=0" in kept

    def test_a_rank_that_is_not_there_cannot_modify(self):
        for found in once_on_ranks(training.weights_set):
            assert "modifier_rank=2, but there are 2 ranks; give one from 0 to 1" in found["no such rank"]

    @pytest.mark.parametrize("name", sorted(INITIALIZE_ERRORS))
    def test_initialize_refuses_what_ranks_cannot_share(self, name):
        for found in once_on_ranks(training.refused_by_initialize):
            assert INITIALIZE_ERRORS[name] in found[name]


def make_engine(**sections):
    config = training.config_of(0, {"type": "SGD", "params": {"lr": 1.0}}, **sections)
    return deepspeed.initialize(model=training.Net(), config=config)[0]


def backward(engine):
    inputs, targets = training.batch(0, 0, 0)
    engine.backward(nn.functional.cross_entropy(engine(inputs), targets))


def test_a_checkpoint_that_is_loaded_within_an_accumulation_drops_its_gradients(tmp_path):
    engine = make_engine()
    engine.save_checkpoint(tmp_path)
    backward(engine)
    engine.step()
    backward(engine)
    engine.load_checkpoint(tmp_path)
    assert all(param.grad is None for param in engine.parameters())
    with pytest.raises(cp.DataError, match="without a backward"):
        engine.step()
    assert engine.is_gradient_accumulation_boundary() is False


def test_a_backward_of_the_script_between_those_of_the_model_is_an_error():
    engine = make_engine()
    backward(engine)
    engine(training.batch(0, 0, 0)[0]).sum().backward()
    with pytest.raises(cp.DataError, match=r"first.weight was changed outside of backward\(\) .* add losses before"):
        backward(engine)
    engine.zero_grad()
    backward(engine)
    engine.module.zero_grad(set_to_none=False)
    backward(engine)
    assert engine.first.weight.grad.count_nonzero() > 0


def test_names_of_the_engine_tell_where_it_trains():
    engine = make_engine()
    for _ in range(2):
        backward(engine)
        engine.step()
    assert (engine.device, engine.local_rank, engine.global_rank) == (torch.device("cpu"), 0, 0)
    assert (engine.world_size, engine.global_samples, engine.cur_scale) == (1, 6, 1.0)
    assert engine.zero_optimization_stage() == 0
    assert engine.module_state_dict().keys() == engine.module.state_dict().keys()


class Sparse(nn.Module):
    """An embedding whose gradient has rows."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)


class Complex(nn.Module):
    """A weight of complex numbers."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Endless(torch.utils.data.IterableDataset[int]):
    """Samples without indices."""

    def __iter__(self):
        yield from ()


BF16 = {"bf16": {"enabled": True}}
RATE = {"lr": 0.1}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "half precision": ({"model": training.Net(torch.bfloat16)}, BF16, "call model.float() before initialize: master"),
    "a sparse embedding": ({"model": Sparse()}, {}, "words has sparse=True, and gradients are sent dense"),
    "complex numbers": ({"model": Complex()}, {}, "waves is torch.complex64, and initialize sums real gradients only"),
    "a schedule that needs a metric": (
        {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, {}, "lr_scheduler is a ReduceLROnPlateau"
    ),
    "an object that is not a schedule": ({"lr_scheduler": object()}, {}, "lr_scheduler is a object, and step() steps"),
    "samples without indices": ({"training_data": Endless()}, {}, "training_data is an IterableDataset"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, {}, "LBFGS needs a function that computes the loss again"),
}  # fmt: skip


@pytest.mark.parametrize("title", WRONG)
def test_what_a_step_cannot_use_is_refused_by_initialize(title):
    arguments, sections, message = WRONG[title]
    config = training.config_of(0, training.ADAMW, **sections)
    given: dict[str, Any] = {"model": training.Net(), "config": config} | arguments
    with pytest.raises(cp.PlanError) as caught:
        deepspeed.initialize(**given)
    assert message in str(caught.value)


def test_an_optimizer_belongs_to_one_engine():
    model = training.Net()
    optimizer = training.sgd(model)
    deepspeed.initialize(model=model, optimizer=optimizer, config=training.config_of())
    with pytest.raises(cp.PlanError, match=r"this SGD belongs to the model that an earlier initialize\(\) returned"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=training.config_of())
