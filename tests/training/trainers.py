"""What the tests of training share: small models in float64, their data, and one run of them."""

import gc
import threading
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.testing.parity import relative_difference
from counterpoint.testing.parity_models import plan_for

ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
STRATEGIES = ["data(2)", "zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "pipeline(2)", "tensor(2)",
              "server(2)"]  # fmt: skip


def make_generator(seed=2):
    return torch.Generator().manual_seed(seed)


def dataset(num_samples=46, width=6, num_classes=3):
    """Its last batch of 12 has 10 samples, so that four microbatches have 3, 3, 2 and 2."""
    random = make_generator()
    inputs = torch.randn(num_samples, width, generator=random, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, num_classes, (num_samples,), generator=random))


def build_seeded(build):
    """Return what is built with the same random numbers every time, without changing the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return build().double()


def mlp():
    return build_seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))


def batch_norm_mlp():
    """BatchNorm and dropout; no bias before the norm, because its gradient would be nothing but rounding."""
    return build_seeded(
        lambda: nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3),
        )
    )  # fmt: skip


def make_trainer(strategy, model=None, **options):
    """Return a trainer with a plan, or with one of this strategy and four microbatches in all."""
    plan = plan_for(strategy, 4) if isinstance(strategy, str) else strategy
    settings = {"loss": F.cross_entropy, "optimizer": ADAMW, "strategy": plan, "batch_norm": "deferred", **options}
    return cp.Trainer(mlp() if model is None else model, **settings)


def fit(strategy, model=None, data=None, *, epochs=1, batch_size=12, fit_options=None, **options):
    """Return the state of the trained model, and what happened."""
    with make_trainer(strategy, model, **options) as one:
        history = one.fit(data or dataset(), batch_size=batch_size, epochs=epochs, **(fit_options or {}))
        return state_of(one.model), history


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def params_of(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal_bits(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def max_difference(mine, theirs, names=None):
    """Return the largest relative difference of any tensor."""
    return max(relative_difference(mine[name], theirs[name]) for name in (names or theirs))


def list_rank_threads():
    gc.collect()  # of steps that failed before they were built, in other tests
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


class StopAt(cp.Callback):
    """Interrupts a run after a step, as Ctrl-C does."""

    def __init__(self, step):
        self.step = step

    def on_step(self, event):
        if event.step == self.step:
            raise KeyboardInterrupt
