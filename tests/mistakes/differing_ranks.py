"""Ways in which two ranks are given different things before the first step, with the error for each."""

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Subset, TensorDataset

import counterpoint as cp
from tests.training.trainers import dataset, mlp

NUM_RANKS = 2
DATA = TensorDataset(*dataset(24).tensors)
INPUTS, TARGETS = dataset(12).tensors
SCALE = 1.0
SETTINGS = SimpleNamespace(scale=1.0, rank=0)
VARIABLE = "SCALE_OF_MODEL"


def is_other():
    return os.environ["RANK"] == "1"


def either(mine, other):
    """Return what this rank is given."""
    return other if is_other() else mine


def step(model=None, optimizer=None, loss=F.cross_entropy, batch=(INPUTS, TARGETS), strategy="data(2)", **options):
    """Take the first step of a loop."""
    model = mlp() if model is None else model
    cp.parallelize(model, optimizer or partial(optim.SGD, lr=0.1), loss, strategy=strategy, **options)(*batch)


def fit(data=DATA, model=None, trainer_options=None, **options):
    """Begin to fit a dataset."""
    given: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": partial(optim.SGD, lr=0.1), "progress": "off"}
    trainer = cp.Trainer(model or mlp(), **given, **(trainer_options or {}))
    trainer.fit(data, **{"batch_size": 12, "max_steps": 1, **options})


class Net(nn.Module):
    """Has settings of many kinds."""

    def __init__(self, width=8, *, order="ab", buffer_dtype=torch.float64, activation=torch.tanh, scale=1.0, sizes=()):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(6, 6).double())
        self.head = nn.Linear(6, 3).double()
        self.register_buffer("offset", torch.zeros(1, dtype=buffer_dtype))
        self.activation, self.scale, self.sizes, self.width = activation, scale, sizes, width

    def forward(self, x):
        hidden = self.get_submodule("a")(x) + self.get_submodule("b")(x)
        return self.head(self.activation(hidden)) * self.scale


class OtherNet(Net):
    """The same parameters, another class."""


class CodedNet(Net):
    """Has the name of another class, and another forward."""

    def forward(self, x):
        return super().forward(x)


class NegatedNet(Net):
    """Gets the name of :class:`CodedNet`."""

    def forward(self, x):
        return -super().forward(x)


class NetWithGlobals(nn.Linear):
    """Reads a global, an attribute of a configuration, an environment variable, and an attribute of its class."""

    offset = 0.0

    def forward(self, x):
        scale = SCALE * SETTINGS.scale * float(os.environ.get(VARIABLE, "1")) + SETTINGS.rank
        return super().forward(x) * scale + self.offset


NegatedNet.__name__ = NegatedNet.__qualname__ = CodedNet.__name__


def groups(names, **options):
    """Return an optimizer with a second group for some parameters of a model."""
    model = mlp()
    named = dict(model.named_parameters())
    second = [named.pop(name) for name in names]
    params = [{"params": [*named.values()]}, *([{"params": second, **options}] if second else [])]
    return model, optim.SGD(params, lr=0.1)


def frozen(name):
    model = mlp()
    if name:
        model.get_parameter(name).requires_grad_(False)
    return model


def closure_loss(factor):
    return lambda output, targets: F.cross_entropy(output, targets) * factor


def default_loss(factor):
    def loss(output, targets, factor=factor):
        return F.cross_entropy(output, targets) * factor

    return loss


def global_loss(output, targets):
    return F.cross_entropy(output, targets) * SCALE


def with_global_scale():
    global SCALE  # noqa: PLW0603 - as a script would
    SCALE = either(1.0, 2.0)
    step(loss=global_loss)


def with_other_value(set_value, loss=F.cross_entropy):
    """Step while what the code of the model, or of the loss, reads is another value on one rank."""
    SETTINGS.rank = either(0, 1)  # which may differ
    set_value(either(1.0, 2.0))
    try:
        step(NetWithGlobals(6, 3).double(), loss=loss)
    finally:
        set_value(1.0)


def set_global(value):
    globals()["SCALE"] = value


def set_variable(value):
    os.environ[VARIABLE] = str(value)


def loss_with_variable(output, targets):
    return F.cross_entropy(output, targets) * float(os.environ[VARIABLE])


def under_setting(get, set_value, value):
    """Step while a setting of torch has another value on one rank."""
    before = get()
    set_value(either(before, value))
    try:
        step()
    finally:
        set_value(before)


def autocast_on_one_rank():
    with torch.autocast("cpu", enabled=is_other()):
        step()


def loader(seed):
    return DataLoader(DATA, 12, shuffle=True, generator=torch.Generator().manual_seed(seed))


def collate(samples):
    return torch.stack([x for x, _ in samples]), torch.tensor([int(y) for _, y in samples])


def other_collate(samples):
    return torch.stack([x for x, _ in samples]) + 1, torch.tensor([int(y) for _, y in samples])


class EveryRank(cp.Callback):
    """Runs on every rank."""

    on_every_rank = True


def fit_or_evaluate():
    trainer = cp.Trainer(mlp(), loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.1), progress="off")
    either(partial(trainer.fit, max_steps=1), trainer.evaluate)(DATA, batch_size=12)


def seeded(seed):
    torch.manual_seed(seed)
    return nn.Linear(6, 3).double()


def with_eval(module=""):
    model = mlp()
    model.get_submodule(module).eval()
    return model


def shifted(data):
    return TensorDataset(data.tensors[0] + 1, data.tensors[1])


Linear = partial(nn.Linear, 6, 3)
DIFFERENCES: dict[str, tuple[Callable[[], object], str]] = {
    "class of the model": (lambda: step(either(Net, OtherNet)()), r"module is Net\(.* on rank 0, OtherNet\("),
    "size of a layer": (lambda: step(nn.Linear(6, either(3, 4)).double()), r"weight is float64 \(3, 6\) on cpu on rank 0, fl"),
    "dtype": (lambda: step(either(Linear().double(), Linear().half())), "weight is float64 .* on rank 0, float16 .* rank 1"),
    "order of parameters": (lambda: step(Net(order=either("ab", "ba"))), "same parameters in another order: at index 0"),
    "frozen parameter": (lambda: step(frozen(either("", "0.bias"))), "0.bias is .* on rank 0, .*, frozen on rank 1"),
    "buffer": (lambda: step(Net(buffer_dtype=either(torch.float64, torch.int64))), "offset is float64 .* on rank 0, int64"),
    "number": (lambda: step(Net(scale=either(1.0, 2.0))), r"scale=1.0.* on rank 0, Net\(.*scale=2.0.* on rank 1"),
    "tuple": (lambda: step(Net(sizes=either((1, 2), (2, 1)))), r"sizes=\(1, 2\).* on rank 0, .*sizes=\(2, 1\)"),
    "activation": (lambda: step(Net(activation=either(torch.tanh, torch.relu))), "activation=tanh.* on rank 0, .*=relu"),
    "code of forward": (lambda: step(either(CodedNet, NegatedNet)()), r"module is CodedNet\(.*code \w+ on rank 0, Coded"),
    "global of forward": (
        lambda: with_other_value(set_global), r"the global SCALE of \S+ is 1.0 on rank 0, 2.0 on rank 1; give the same value"
    ),
    "configuration": (
        lambda: with_other_value(partial(setattr, SETTINGS, "scale")), r"global SETTINGS of \S+.scale is 1.0 on rank 0, 2.0 on"
    ),
    "attribute of a class": (
        lambda: with_other_value(partial(setattr, NetWithGlobals, "offset")), "NetWithGlobals.offset is 1.0 on rank 0, 2.0 on"
    ),
    "environment variable": (
        lambda: with_other_value(set_variable), "variable SCALE_OF_MODEL is '1.0' on rank 0, '2.0' on rank 1; give the same"
    ),
    "environment variable of the loss": (
        lambda: with_other_value(set_variable, loss_with_variable), "variable SCALE_OF_MODEL is '1.0' on rank 0, '2.0' on"
    ),
    "training mode": (lambda: step(mlp().train(not is_other())), "the model is in training mode on rank 0, in evaluation"),
    "mode of a module": (lambda: step(with_eval(either("3", "1"))), "in training mode but for 3 on rank 0, .* for 1 on"),
    "rate of dropout": (
        lambda: step(nn.Sequential(Linear().double(), nn.Dropout(either(0.1, 0.2)))),
        r"module 1 is Dropout\(p=0.1, inplace=False\) on rank 0, Dropout\(p=0.2",
    ),
    "sparse gradients": (
        lambda: step(nn.EmbeddingBag(9, 3, sparse=is_other()).double(), batch=(INPUTS.long().abs() % 9, TARGETS)),
        "weight is float64 .* on rank 0, .*with sparse gradients on rank 1",
    ),
    "seed of the weights": (lambda: step(seeded(either(0, 1)), init_sync="verify"), "rank 1 started with other values than"),
    "class of the optimizer": (
        lambda: step(optimizer=either(partial(optim.Adam, lr=0.1), partial(optim.AdamW, lr=0.1))),
        "the optimizer is Adam on rank 0, AdamW on rank 1",
    ),
    "learning rate": (lambda: step(optimizer=partial(optim.SGD, lr=either(0.1, 0.2))), "lr of .* group 0 is 0.1 on rank 0"),
    "momentum": (lambda: step(optimizer=partial(optim.SGD, lr=0.1, momentum=either(0, 0.9))), "momentum of .* is 0 on rank 0"),
    "nesterov": (
        lambda: step(optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=is_other())), "nesterov of .* is False on"
    ),
    "foreach": (lambda: step(optimizer=partial(optim.SGD, lr=0.1, foreach=either(None, True))), "foreach of .* is None on"),
    "parameters of a group": (
        lambda: step(*groups(either(["0.bias"], ["2.bias"]))), "the list of parameters in the optimizer's group 0 is"
    ),
    "number of groups": (lambda: step(*groups(either([], ["0.bias"]))), "the list of parameters in the optimizer's group 0"),
    "option of a group": (
        lambda: step(*groups(["0.bias"], weight_decay=either(0.0, 0.1))), "weight_decay of the optimizer's group 1 is 0.0 on"
    ),
    "strategy": (lambda: step(strategy=either("data(2)", "zero2(2)")), "the plan is data.* on rank 0, zero.* on rank 1; give"),
    "automatic strategy": (lambda: step(strategy=either("data(2)", "auto")), "the plan is data.* on rank 0, auto on rank 1"),
    "microbatches": (lambda: step(num_microbatches=either(1, 2)), "with 1 microbatch on rank 0, .* with 2 microbatches on"),
    "given microbatches": (
        lambda: step(strategy="pipeline(2)", **either({}, {"num_microbatches": 1})),
        "the option num_microbatches is None on rank 0, 1 on rank 1",
    ),
    "schedule": (
        lambda: step(strategy=either("pipeline(2, schedule=gpipe)", "pipeline(2)")), "the plan is .*gpipe.* on rank 0, pip"
    ),
    "passes": (lambda: step(passes=either(("overlap",), ())), r"the option passes is \('overlap',\) on rank 0, \(\) on"),
    "clip_norm": (lambda: step(clip_norm=either(None, 1.0)), "the option clip_norm is None on rank 0, 1.0 on rank 1; give"),
    "clip_value": (lambda: step(clip_value=either(1.0, 2.0)), "the option clip_value is 1.0 on rank 0, 2.0 on rank 1"),
    "check_finite": (lambda: step(check_finite=either("gradients", "loss")), "check_finite is 'gradients' on rank 0"),
    "nonfinite": (lambda: step(nonfinite=either("error", "skip")), "nonfinite is 'error' on rank 0, 'skip' on rank 1"),
    "loss_reduction": (lambda: step(loss_reduction=either("mean", "sum")), "loss_reduction is 'mean' on rank 0"),
    "unused_parameters": (lambda: step(unused_parameters=either("error", "zero")), "unused_parameters is 'error' on rank"),
    "seed": (lambda: step(seed=either(0, 1)), "the option seed is 0 on rank 0, 1 on rank 1; give the same value on all"),
    "name of the loss": (lambda: step(loss=either(F.cross_entropy, F.nll_loss)), "the loss is cross_entropy, .* on rank 0"),
    "code of the loss": (
        lambda: step(loss=either(lambda x, y: F.nll_loss(x, y), lambda x, y: -F.nll_loss(x, y))), "the loss is .*lambda>, code"
    ),
    "closure of the loss": (lambda: step(loss=closure_loss(either(1.0, 2.0))), r"the loss is closure_loss.*, code \w+ on"),
    "default of the loss": (lambda: step(loss=default_loss(either(1.0, 2.0))), r"the loss is default_loss.*, code \w+ on"),
    "global of the loss": (with_global_scale, r"the loss is global_loss, code \w+ on rank 0, global_loss, code \w+ on rank 1"),
    "argument of the loss": (
        lambda: step(loss=partial(F.cross_entropy, label_smoothing=either(0.0, 0.1))), r"\('label_smoothing', 0.0\) on rank 0"
    ),
    "setting of the loss": (
        lambda: step(loss=nn.CrossEntropyLoss(label_smoothing=either(0.0, 0.1))), r"the loss is CrossEntropyLoss\(\), code"
    ),
    "size of the batch": (
        lambda: step(batch=either((INPUTS, TARGETS), (INPUTS[:10], TARGETS[:10]))),
        "the size of the batch is 12 samples on rank 0, 10 samples on rank 1; every rank passes the same global batch",
    ),
    "dtype of the batch": (
        lambda: step(batch=(INPUTS, either(TARGETS, TARGETS.int()))), r"the form of the batch is .*int64 \(12,\).* on rank 0"
    ),
    "content of the batch": (
        lambda: step(batch=(INPUTS + either(0, 1), TARGETS)), r"the content of the batch is digest \w+ on rank 0, digest"
    ),
    "whose batches": (lambda: step(batches=either("global", "per_rank")), "the argument batches is 'global' on rank 0, 'per"),
    "uneven": (lambda: step(batches="per_rank", uneven=either(True, False)), "the argument uneven is True on rank 0, False"),
    "default dtype": (
        partial(under_setting, torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "torch's default dtype is float32 on rank 0, float64 on rank 1; start all ranks with the same settings",
    ),
    "deterministic algorithms": (
        partial(under_setting, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        r"torch.are_deterministic_algorithms_enabled\(\) is False on rank 0, True on rank 1",
    ),
    "precision of products": (
        partial(under_setting, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
        r"torch.get_float32_matmul_precision\(\) is highest on rank 0, medium on rank 1",
    ),
    "autocast": (autocast_on_one_rank, "the autocast of the call is none on rank 0, cpu on rank 1"),
    "length of the dataset": (
        lambda: fit(either(DATA, TensorDataset(*dataset(20).tensors))), "the dataset is 24 samples of .* on rank 0, 20 sam"
    ),
    "content of the dataset": (lambda: fit(either(DATA, shifted(DATA))), r"the content of samples is digest \w+ of 8 of them on rank 0, digest"),
    "order of a subset": (
        lambda: fit(Subset(DATA, either(range(24), [*range(11), 12, 11, *range(13, 24)]))), "24 samples of .*, indices with"
    ),
    "order of a loader": (lambda: fit(loader(either(1, 2)), batch_size=None), "the order of samples is .*digest"),
    "batches of a stream": (
        lambda: fit([(INPUTS + either(0, 1), TARGETS)], batch_size=None), "the first batch is 12 samples, digest"
    ),
    "kind of data": (lambda: fit(either(DATA, [(INPUTS, TARGETS)]), batch_size=either(12, None)), "batch_size is 12 on rank"),
    "batch_size": (lambda: fit(batch_size=either(12, 6)), "the argument batch_size is 12 on rank 0, 6 on rank 1"),
    "collate_fn": (lambda: fit(collate_fn=either(collate, other_collate)), "the argument collate_fn is collate, code"),
    "epochs": (lambda: fit(epochs=either(1, 2)), "the argument epochs is 1 on rank 0, 2 on rank 1"),
    "max_steps": (lambda: fit(max_steps=either(1, 2)), "the argument max_steps is 1 on rank 0, 2 on rank 1"),
    "held-out data": (lambda: fit(eval_dataset=either(DATA, shifted(DATA))), "the held-out data is 24 samples of"),
    "whether there are held-out data": (lambda: fit(eval_dataset=either(DATA, None)), "eval_dataset is TensorDataset on rank 0"),
    "evaluate_every": (lambda: fit(eval_dataset=DATA, evaluate_every=either(1, 2)), "evaluate_every is 1 on rank 0, 2 on"),
    "metrics": (
        lambda: fit(eval_dataset=DATA, metrics=either(lambda x, y: {}, lambda x, y: {"a": 1})), "the argument metrics is"
    ),
    "checkpoint_dir": (lambda: fit(checkpoint_dir=either(None, "x")), "the argument checkpoint_dir is None on rank 0, 'x'"),
    "save_every": (lambda: fit(checkpoint_dir="x", save_every=either(1, 2)), "save_every is 1 on rank 0, 2 on rank 1"),
    "resume": (lambda: fit(resume=either("a", "b")), "the argument resume is 'a' on rank 0, 'b' on rank 1"),
    "callbacks": (
        lambda: fit(trainer_options={"callbacks": either((), (EveryRank(),))}),
        r"the argument callbacks is \(\) on rank 0, \(EveryRank\) on rank 1",
    ),
    "lr_scheduler": (
        lambda: fit(trainer_options={"lr_scheduler": partial(optim.lr_scheduler.StepLR, step_size=either(1, 2))}),
        "the argument lr_scheduler is StepLR, code .* on rank 0",
    ),
    "code of the lr_scheduler": (
        lambda: fit(
            trainer_options={
                "lr_scheduler": partial(optim.lr_scheduler.LambdaLR, lr_lambda=either(lambda k: 1.0, lambda k: 0.5**k))
            }
        ),
        "the argument lr_scheduler is LambdaLR, code .* on rank 0",
    ),
    "trainer or loop": (lambda: either(step, fit)(), "the call is parallelize on rank 0, Trainer.fit on rank 1"),
    "fit or evaluate": (fit_or_evaluate, "the call is Trainer.fit on rank 0, Trainer.evaluate on rank 1; every rank runs the"),
}  # fmt: skip


def differ_in_every_way():
    """Return for each way the error and the seconds."""
    answers = {}
    for name, (run, _) in DIFFERENCES.items():
        began = time.perf_counter()
        try:
            run()
            answer = "no error"
        except Exception as error:  # noqa: BLE001 - sent to the test
            answer = f"{type(error).__name__}: {error}"
        answers[name] = answer, time.perf_counter() - began
    return answers
