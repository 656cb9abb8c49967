"""What a user may get wrong: each error says what, the rule and the remedy, and leaves nothing half-done."""

import re
import warnings
from ast import literal_eval
from functools import partial
from inspect import signature
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.data.sampler import Sampler
from counterpoint.training.options import (
    OTHER_FIT_OPTIONS,
    OTHER_OPTIONS,
    RENAMED_FIT_OPTIONS,
    RENAMED_OPTIONS,
    RENAMED_VALUES,
    TrainingOptions,
)
from counterpoint.training.parallelize import RENAMED_METHODS
from counterpoint.training.profiling import RENAMED_PROFILE_OPTIONS
from tests.training.trainers import (
    ADAMW,
    STRATEGIES,
    StopAt,
    build_seeded,
    dataset,
    equal_bits,
    fit,
    list_rank_threads,
    make_generator,
    make_trainer,
    max_difference,
    mlp,
    state_of,
)

FAMILIES = ["solo", *STRATEGIES, "server(2, consistency=asp)"]


class Forgetful(nn.Module):
    """One of its layers is never called; and no pair of them could be sharded."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Moody(nn.Module):
    """What it computes depends on the values, which no trace can follow."""

    def forward(self, x):
        return x * 2 if float(x.detach().abs().sum()) > 0 else x * 3


class Winding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(6, 8), Moody(), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.branch(self.first(x)))


def refused(error, model, strategy="data(2)", **options):
    """Return the error's text; the model, torch's random state and the threads are as they were."""
    before, random = state_of(model), torch.get_rng_state()
    with pytest.raises(error) as caught:
        cp.Trainer(model, **{"loss": F.cross_entropy, "optimizer": ADAMW, "strategy": strategy, **options}).fit(
            dataset(), batch_size=12
        )
    assert equal_bits(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert list_rank_threads() == []
    return str(caught.value)


@pytest.mark.long(quick=["options11-..."])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "zro(2)"}, "there is no strategy 'zro'; did you mean zero? the strategies are solo, data, zero"),
        ({"clip_nrm": 1.0}, "there is no option 'clip_nrm'; did you mean clip_norm? the options are seed, clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0 would leave no gradient; give a positive norm, or None"),
        ({"clip_value": 0.0}, "clip_value=0.0 would leave no gradient; give a positive number, or None"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not one of error, skip"),
        ({"strategy": "pipeline(8)"},
         "the pipeline has 8 stages, but the model has only 3 blocks; every stage needs one: give at most 3 stages"),
        ({"strategy": "data(2)", "num_microbatches": 5},
         "a batch of 12 samples cannot be split into the 10 equal microbatches of data(2) with num_microbatches=5; "
         "give batch_size=10 or 20, or give another num_microbatches"),
        ({"optimizer": lambda params: optim.SGD(list(params)[2:], lr=0.1)},
         "the optimizer does not hold 0.weight, 0.bias; give it all trainable parameters, or freeze these with "
         "requires_grad_(False)"),
        ({"optimizer": lambda _: optim.SGD(mlp().parameters(), lr=0.1)},
         "the optimizer holds 6 tensors that the model does not train, the first of the shape (8, 6); it lacks "
         "0.weight, 0.bias, 2.weight, 2.bias, 4.weight and others, so it was built for another model, or before this "),
        ({"optimizer": "adam"},
         "optimizer='adam' is neither an optimizer nor a way to make one; pass a torch optimizer on the model's "),
        ({"lr_scheduler": optim.lr_scheduler.ReduceLROnPlateau},
         "ReduceLROnPlateau steps by a metric, but a trainer steps its scheduler after every step, without one; use"),
        ({"optimizer": partial(optim.Adafactor, lr=0.1), "strategy": "tensor(2)"},
         "Adafactor may need whole tensors, but under tensor(2) a rank has only a shard of "),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_says_why_and_what_can(options, text):
    assert refused(cp.PlanError, mlp(), **options).startswith(text)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_composition_for_another_number_of_ranks_says_which_axes_it_has(num_ranks):
    result = cp.Plan.parse("pipeline(2) * data(2)")
    with pytest.raises(cp.PlanError) as caught:
        result.require_ranks(num_ranks)
    there = "there is 1" if num_ranks == 1 else "there are 3"
    assert str(caught.value) == (
        f"{result} needs 4 ranks (stage=2, data=2), but {there}; start 4 ranks, or change the numbers in the plan"
    )


@pytest.mark.parametrize(("old", "new"), RENAMED_OPTIONS.items())
def test_a_former_option_names_the_new_one(old, new):
    former: Any = {old: None}
    with pytest.raises(cp.PlanError, match=re.escape(f"there is no option {old!r}; {old} is now called {new}")):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, **former)
    with pytest.raises(cp.PlanError, match=re.escape(f"there is no option {old!r}; {old} is now called {new}")):
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, **former)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("shuffle", "DataLoader(dataset, batch_size=..., shuffle=False)"),
        ("sampler", "DataLoader(dataset, batch_size=..., sampler=...)"),
        ("lr_schedule", "lr_scheduler is an option of Trainer(...)"),
        ("batchsize", "did you mean batch_size?"),
    ],
)
def test_an_option_that_fit_does_not_have_says_what_does_it(name, remedy):
    options: Any = {name: None}
    with pytest.raises(cp.PlanError, match=f"^fit has no option '{name}'; .*{re.escape(remedy)}"):
        make_trainer("solo").fit(dataset(), **options)


TRAINER_REMEDIES = {
    "gradient_accumulation_steps": "write that, and make batches 4 times as large",
    "max_grad_norm": "write clip_norm=",
    "fp16": "write precision='bf16' or 'fp16'",
    "lr": "the optimizer has it: optimizer=partial(",
    "num_processes": "as strategy='data(2)', and `counterpoint run -n 2`",
    "gradient_checkpointing": 'write passes=("overlap", "recompute")',
    "batch_size": "it is an option of fit(...): trainer.fit(dataset, batch_size=...)",
    "output_dir": "in fit(...): run_dir=FOLDER writes metrics",
    "batch_dim": "did you mean batch_dims? the options are seed, ",
}


@pytest.mark.parametrize(("name", "remedy"), TRAINER_REMEDIES.items())
def test_an_option_of_another_library_says_what_is_written_here(name, remedy):
    options: Any = {name: 4}
    with pytest.raises(cp.PlanError, match=f"^there is no option '{name}'; .*{re.escape(remedy)}"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, **options)


LOOP_REMEDIES = {
    "accumulate": r"step.accumulate(batch) and step.update()",
    "epochs": "a loop of your own has it",
    "resume": "calls step.save(folder) and step.load(folder)",
    "metrics": "with step.full_weights() as model:",
    "num_microbatch": "did you mean num_microbatches? the options are seed, ",
}


@pytest.mark.parametrize(("name", "remedy"), LOOP_REMEDIES.items())
def test_an_option_that_a_loop_has_itself_says_how(name, remedy):
    options: Any = {name: 4}
    with pytest.raises(cp.PlanError, match=f"^there is no option '{name}'; .*{re.escape(remedy)}"):
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, **options)


FIT_REMEDIES = {
    "val_data": "write eval_dataset=",
    "logging_steps": "run_dir=FOLDER writes metrics",
    "patience": "call fit(...) for one epoch after another",
    "per_device_train_batch_size": "write batch_size=, the samples of a step on all ranks together",
    "gradient_clip_val": "write clip_norm=",
}


@pytest.mark.parametrize(("name", "remedy"), FIT_REMEDIES.items())
def test_what_fit_is_given_as_to_another_library_says_what_is_written_here(name, remedy):
    options: Any = {name: 4}
    with pytest.raises(cp.PlanError, match=f"^fit has no option '{name}'; .*{re.escape(remedy)}"):
        make_trainer("solo").fit(dataset(), batch_size=12, **options)


def test_each_remedy_names_options_that_exist():
    fit, own = [signature(one).parameters for one in (cp.Trainer.fit, cp.Trainer)]
    known = {*fit, *own, *TrainingOptions.__dataclass_fields__, "shuffle", "sampler", "batch_sampler", "drop_last"}
    for hints in (OTHER_OPTIONS, OTHER_FIT_OPTIONS):
        assert known.isdisjoint(hints.keys() - {"shuffle", "sampler", "batch_sampler", "drop_last"})
        named = {name for hint in hints.values() for name in re.findall(r"(?:write |with |^)(\w+)=", hint)}
        assert named <= known


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("cross_entropy", "loss='cross_entropy' cannot be called; give a function of outputs and targets, such as "),
        (torch.nn.CrossEntropyLoss, "loss=CrossEntropyLoss is a class; give an instance, loss=CrossEntropyLoss(), or "),
    ],
)
def test_a_loss_that_is_no_function_is_refused_at_once(loss, text):
    with pytest.raises(cp.PlanError, match=f"^{re.escape(text)}"):
        cp.Trainer(mlp(), loss=loss, optimizer=ADAMW)
    with pytest.raises(cp.PlanError, match=f"^{re.escape(text)}"):
        cp.parallelize(mlp(), ADAMW, loss)


@pytest.mark.parametrize("callbacks", [cp.Callback(), [print]])
def test_callbacks_that_are_none_say_what_they_are(callbacks):
    with pytest.raises(cp.PlanError, match=r"is not a list of callbacks; give callbacks=\[PrintLoss\(\)\], of a class"):
        make_trainer("solo", callbacks=callbacks)


def test_resume_true_says_auto():
    unknown: Any = True
    with pytest.raises(cp.PlanError, match=r"^resume=True is neither 'auto' nor a folder; resume='auto' continues"):
        make_trainer("solo").fit(dataset(), batch_size=12, resume=unknown)


@pytest.mark.parametrize("returned", [0.5, {"accuracy": 0.5}])
def test_what_a_metrics_function_returns_is_named_if_it_is_no_sum_with_its_count(returned):
    with pytest.raises(cp.DataError, match=re.escape(f"the metrics function returned {returned!r}; give one of outp")):
        make_trainer("solo").evaluate(dataset(), metrics=lambda *_: returned)


def test_metrics_that_are_no_function_are_refused_before_the_first_step():
    unknown: Any = {"accuracy"}
    with pytest.raises(cp.PlanError, match=r"^metrics=\{'accuracy'\} is not a function; give one of outputs and tar"):
        make_trainer("solo").fit(dataset(), batch_size=12, eval_dataset=dataset(), metrics=unknown)


def test_a_misspelt_parameter_of_a_call_names_the_nearest():
    with pytest.raises(cp.PlanError, match="there is no option 'lr_schedule'; did you mean lr_scheduler"):
        cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=ADAMW, **cast("Any", {"lr_schedule": None}))
    with pytest.raises(cp.PlanError, match="there is no option 'stratgy'; did you mean strategy"):
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, **cast("Any", {"stratgy": "solo"}))
    with pytest.raises(cp.PlanError, match=r"there is no option 'lr_scheduler'; a loop .* call scheduler.step\(\)"):
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, **cast("Any", {"lr_scheduler": None}))


@pytest.mark.parametrize("name", ["overlap", "prefetch", "recompute"])
def test_an_option_that_is_a_pass_says_how_it_is_written(name):
    options: Any = {name: True}
    with pytest.raises(cp.PlanError, match="it is a pass of the program: write passes=") as caught:
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, **options)
    written = literal_eval(str(caught.value).split("passes=")[1])
    with cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="zero3(2)", passes=written) as step:
        step(torch.randn(4, 6).double(), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize(("old", "new"), RENAMED_FIT_OPTIONS.items())
def test_a_former_option_of_fit_names_the_new_one(old, new):
    with pytest.raises(cp.PlanError, match=re.escape(f"fit has no option {old!r}; {old} is now called {new}")):
        make_trainer("solo").fit(dataset(), batch_size=12, **{old: None})


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        (cp.Trainer.evaluate, "measure", "metrics"),
        (cp.Trainer.save, "keep", "keep_last"),
        (cp.launch, "deadline_s", "timeout_s"),
        *((cp.profile, old, new) for old, new in RENAMED_PROFILE_OPTIONS.items()),
    ],
)
def test_a_former_option_of_a_function_names_the_new_one(function, old, new):
    assert new in signature(function).parameters
    with pytest.raises(cp.PlanError, match=f"^{function.__name__} has no parameter {old}; {old} is now called {new}$"):
        function(None, **{old: None})


def use_option(name, value):
    """Call what takes an option with a value."""
    if name == "batches":
        cp.parallelize(mlp(), ADAMW, F.cross_entropy, batches=value)
    elif name == "checkpoint_mode":
        make_trainer("solo").fit(dataset(), batch_size=12, checkpoint_mode=value)
    else:
        TrainingOptions(**{name: value})


@pytest.mark.parametrize(("old", "new"), RENAMED_VALUES.items())
def test_a_former_value_of_an_option_names_the_new_one(old, new):
    with pytest.raises(cp.PlanError, match=f"; {old} is now called {new}$"):
        use_option(*old.split("="))


@pytest.mark.parametrize(("old", "new"), RENAMED_METHODS.items())
def test_a_former_method_of_a_training_step_names_the_new_one(old, new):
    with cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="solo") as step:
        assert hasattr(step, new)
        assert not hasattr(step, "colour")
        with pytest.raises(
            AttributeError, match=f"'TrainStep' object has no attribute '{old}'; {old} is now called {new}"
        ):
            getattr(step, old)


def test_a_step_has_no_module_as_other_wrappers_of_models_have():
    with cp.parallelize(mlp(), ADAMW, F.cross_entropy, strategy="solo") as step:
        assert not hasattr(step, "module")
        with pytest.raises(AttributeError, match="attribute 'module'; the model is the one that was passed"):
            cast("Any", step).module.state_dict()


def test_the_new_names_of_options_exist():
    new = {text.split(" ")[0] for text in (*RENAMED_OPTIONS.values(), *RENAMED_FIT_OPTIONS.values())}
    known = {
        *TrainingOptions.__dataclass_fields__,
        *signature(cp.Trainer).parameters,
        *signature(cp.Trainer.fit).parameters,
    }
    assert new <= known


@pytest.mark.long(quick=["model0-..."])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (nn.Sequential(nn.Flatten()), "the model has 0 parameters, none of them trainable, so there is nothing to"),
        (mlp().requires_grad_(False), "the model has 6 parameters, none of them trainable, so there is nothing to"),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(model, text):
    assert refused(cp.PlanError, model).startswith(f"{text} train; pass a model with parameters that require")


@pytest.mark.long(quick=["zero(2, level=2)"])
@pytest.mark.parametrize("strategy", [name for name in FAMILIES if name != "tensor(2)"])
def test_unused_parameters_are_named_under_every_strategy(strategy):
    text = refused(cp.DataError, build_seeded(Forgetful), strategy=strategy)
    assert text.startswith("no gradient reached never.weight, never.bias: the loss does not depend on them; freeze")
    assert text.endswith("to leave them as they are in such a step, or 'zero' to use gradients of zeros")


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "tensor(2)"])
def test_unused_parameters_may_have_gradients_of_zeros_under_every_strategy(strategy):
    """Weight decay still moves them, and by as much under every plan."""
    mine, theirs = (fit(one, build_seeded(Forgetful), unused_parameters="zero")[0] for one in (strategy, "solo"))
    assert max_difference(mine, theirs) <= 1e-12
    assert not torch.equal(theirs["never.weight"], build_seeded(Forgetful).never.weight)


def broken_at(step):
    """Return the data with one sample that is not a number, in the batch of one step."""
    inputs, targets = dataset().tensors
    inputs[Sampler(46, 12).batch(0, step)[4]] = torch.nan
    return TensorDataset(inputs, targets)


@pytest.mark.long(quick=["server(2, consistency=asp)"])
@pytest.mark.parametrize("strategy", FAMILIES)
def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(strategy):
    model = mlp()
    expected, _ = fit(strategy, fit_options={"max_steps": 2})
    with pytest.raises(cp.DataError) as caught:
        fit(strategy, model, broken_at(2))
    assert re.match(
        r"step 2 cannot be applied: the loss of microbatch \d on rank \d is nan; the parameters are unchanged; "
        r"if no value of that microbatch counts, .* return cp\.WeightedMean\(total, weight\); else check the samples .* or pass nonfinite='skip' to skip such steps on all ranks$",
        str(caught.value),
    )
    assert equal_bits(state_of(model), expected)
    assert list_rank_threads() == []


@pytest.mark.long(quick=["zero(2, level=1)", "pipeline(2)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_a_skipped_step_changes_nothing_on_any_rank(strategy):
    skipped, history = fit(strategy, data=broken_at(1), nonfinite="skip", fit_options={"max_steps": 2})
    assert equal_bits(skipped, fit(strategy, fit_options={"max_steps": 1})[0])
    assert [bool(step.skip_reason) for step in history.steps] == [False, True]


def test_too_many_skipped_steps_in_a_row_end_the_run():
    text = "21 steps in a row were skipped, the last one, step 20, because the loss of microbatch 0 on rank 0 is nan;"
    with pytest.raises(cp.DataError, match=re.escape(text)):
        fit("data(2)", loss=lambda x, y: F.cross_entropy(x, y) * float("nan"), nonfinite="skip", epochs=6)


def exploding(outputs, _):
    """A finite loss whose gradient is not."""
    return torch.sqrt(outputs - outputs.detach()).mean()


@pytest.mark.long(quick=["zero(2, level=3)"])
@pytest.mark.parametrize("strategy", ["solo", *STRATEGIES])
def test_a_gradient_that_is_not_finite_is_named(strategy):
    text = refused(cp.DataError, mlp(), strategy=strategy, loss=exploding)
    assert re.match(
        r"step 0 cannot be applied: the gradient of \d.(weight|bias) in microbatch \d on rank \d is not finite; the "
        "parameters are unchanged",
        text,
    )


@pytest.mark.long(quick=["loss0-has the shape \\\\(3,\\\\)"])
@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (partial(F.cross_entropy, reduction="none"), r"has the shape \(3,\)"),
        (lambda outputs, targets: F.cross_entropy(outputs, targets).item(), "is a float"),
    ],
)
def test_a_loss_that_is_not_one_number_of_torch_is_refused(loss, what):
    text = refused(cp.DataError, mlp(), strategy="data(2)", num_microbatches=2, loss=loss)
    assert re.match(f"the loss of microbatch 0 {what}; it must be a 0-dim tensor, the mean over the", text)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens))


@pytest.mark.long(quick=["zero(2, level=2)", "server(2)"])
@pytest.mark.parametrize("strategy", ["data(2)", "zero(2, level=2)", "pipeline(2)", "server(2)"])
def test_sparse_gradients_train_under_every_plan(strategy):
    tokens = TensorDataset(torch.randint(0, 10, (24, 4), generator=make_generator()), dataset(24).tensors[1])
    sgd = partial(optim.SGD, lr=0.1)
    mine, alone = (fit(one, build_seeded(Bag), tokens, optimizer=sgd, clip_norm=0.5)[0] for one in (strategy, "solo"))
    assert max_difference(mine, alone) <= 1e-12


@pytest.mark.long(quick=["tensor(2)"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "tensor(2)"])
def test_a_model_that_cannot_be_traced_is_refused_by_name_where_it_must_be_split(strategy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = refused(cp.PlanError, build_seeded(Winding), strategy=strategy)
    assert text.startswith("tracing the model stopped in module 'branch' (Moody) at ")
    assert "train it with a strategy that keeps the model whole (data, zero of level 1 or 2, server)" in text


@pytest.mark.filterwarnings("ignore:.* gathers weights block by block")
@pytest.mark.long(quick=["zero(2, level=1)", "server(2)"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in {"pipeline(2)", "tensor(2)"}])
def test_a_model_that_cannot_be_traced_trains_where_it_need_not_be_split(strategy):
    """Under level 3 the second rank copied the model after the first had freed its weights, and torch crashed."""
    mine, theirs = (fit(one, build_seeded(Winding))[0] for one in (strategy, "solo"))
    assert max_difference(mine, theirs) <= 1e-12


def test_a_loader_and_another_batch_size_are_refused():
    with pytest.raises(
        cp.PlanError, match=r"^batch_size=12 and a DataLoader with batch_size=1 were given; .* or pass l"
    ):
        make_trainer("solo").fit(torch.utils.data.DataLoader(dataset()), batch_size=12)


def test_a_time_to_save_without_a_place_is_refused():
    with pytest.raises(cp.PlanError, match=r"^save_every=2 needs a folder; give checkpoint_dir=FOLDER as well$"):
        make_trainer("solo").fit(dataset(), batch_size=12, save_every=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 3.5), ("batch_size", -4), ("epochs", 0), ("epochs", -1), ("max_steps", -1), ("keep_last", 0),
     ("evaluate_every", 0), ("save_every", 0)],
)  # fmt: skip
def test_a_number_to_count_with_is_whole_and_at_least_one(name, value, tmp_path):
    """Some of these were found out after the last step, some after the first, some never."""
    calls, options = [], {"batch_size": 12, "checkpoint_dir": tmp_path / "new", "eval_dataset": dataset(), name: value}
    with pytest.raises(cp.PlanError, match=f"^{name}={value} is not a count; give a whole number, 1 or"):
        make_trainer("solo", loss=lambda *_: calls.append(1)).fit(dataset(), **options)
    assert not calls
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_file_in_the_place_of_checkpoints_is_found_before_the_first_step(below, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        cp.CheckpointError, match=r"file is a file, but checkpoints need a folder; choose another path$"
    ):
        make_trainer("solo", callbacks=[StopAt(0)]).fit(
            dataset(), batch_size=12, checkpoint_dir=tmp_path / "file" / below
        )


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "pipeline(2)"])
def test_an_error_of_torch_says_in_which_step_and_microbatch_it_was(strategy):
    inputs, targets = dataset(12).tensors
    targets[Sampler(12, 12).batch(0, 0)[7]] = 99
    with pytest.raises(IndexError, match="Target 99 is out of bounds") as caught:
        fit(strategy, data=TensorDataset(inputs, targets))
    assert any(re.fullmatch(r"in step 0 on rank \d, microbatch 2", note) for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"share_params_on_host": "off"}, r"^share_params_on_host='off' is a str; give True or False$"),
        ({"retain_freed_memory": None}, r"^retain_freed_memory=None is a NoneType; give True or False$"),
        ({"clip_norm": True}, r"^clip_norm=True is a bool; give a positive number$"),
        *(
            (
                {"timeout_s": limit},
                r"^timeout_s=.* is not a time to wait; give a positive number of seconds, 2000000 at most$",
            )
            for limit in (0.0, float("nan"), float("inf"))
        ),
        ({"timeout_s": "3"}, r"^timeout_s='3' is a str; give a positive number$"),
        ({"optimizer": partial(optim.LBFGS, lr=1.0)}, r"^LBFGS.step needs a closure that computes the loss again"),
    ],
)
def test_an_option_of_another_kind_is_refused(options, text):
    chosen = {"optimizer": partial(optim.SGD, lr=0.1), **options}
    with pytest.raises(cp.PlanError, match=text):
        cp.parallelize(mlp(), loss=F.cross_entropy, **chosen)


@pytest.mark.parametrize("strategy", ["solo", "data(2)"])
def test_a_packed_sequence_is_refused_by_name_with_what_to_give(strategy):
    """The error named the lengths of its inner tensors."""
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 6), torch.ones(2, 6)])
    step = cp.parallelize(mlp(), optim.SGD, F.cross_entropy, strategy=strategy)
    with pytest.raises(
        cp.DataError, match=r"^the batch has a PackedSequence, .* call pack_padded_sequence in forward$"
    ):
        step(packed, torch.zeros(2, dtype=torch.int64))
    step.close()


def call(kind, *args, **options):
    model = nn.Linear(2, 1)
    sgd = optim.SGD(model.parameters(), lr=0.1)
    if kind == "Trainer":
        return cp.Trainer(model, *args, **options)
    if kind == "parallelize":
        return cp.parallelize(model, sgd, F.mse_loss, *args, **options)
    owner = (
        cp.Trainer(model, loss=F.mse_loss, optimizer=sgd)
        if kind in {"fit", "evaluate"}
        else cp.parallelize(model, sgd, F.mse_loss, strategy="solo")
    )
    return getattr(owner, kind)(*args, **options)


@pytest.mark.parametrize(
    ("kind", "args", "options", "message"),
    [
        ("Trainer", (0, 0), {}, "Trainer takes 1 positional argument (model), but 3 were given; give what follows by "
         "keyword: Trainer(model, loss=..., optimizer=...)"),
        ("parallelize", ("data(2)",), {}, "keyword: parallelize(model, optimizer, loss, strategy=...)"),
        ("fit", ([], 4), {}, "keyword: fit(dataset, batch_size=...)"),
        ("Trainer", (), {"los": 0, "optimizer": 0}, "Trainer needs loss; los was given: did you mean loss?"),
        ("Trainer", (), {"loss": 0}, "Trainer needs optimizer; give optimizer=..."),
        ("evaluate", ([],), {"metric": 0}, "evaluate has no option 'metric'; did you mean metrics?"),
        ("save", ("folder",), {"schedulr": 0}, "save has no option 'schedulr'; did you mean scheduler?"),
        ("load", ("folder",), {"zzz": 0}, "load has no option 'zzz'; its options are folder, scheduler, if_missing"),
        ("full_weights", (), {"write_back": True}, "full_weights has no option 'write_back'; did you mean writeback?"),
    ],
)  # fmt: skip
def test_calls_with_other_arguments_name_the_right_ones(kind, args, options, message):
    with pytest.raises(cp.PlanError, match=re.escape(message)):
        call(kind, *args, **options)
