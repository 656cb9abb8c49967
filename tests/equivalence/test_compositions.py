"""Every synchronous order inside and around other strategies: clipping, schedules, accumulation, all as alone."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn, optim

from counterpoint.plan.plan import Plan
from counterpoint.testing import parity
from counterpoint.testing.parity_models import ParityModel, TrainConfig, plan_for
from tests.covering import each_value_once, given_few_or_many
from tests.program.verify.random_plans import TESTED_SCHEDULES
from tests.training.trainers import build_seeded, fit, max_difference

SCHEDULES = [
    f"pipeline(2, schedule={name}" + (f", chunks_per_stage={chunks})" if chunks > 1 else ")")
    for name, chunks in sorted(TESTED_SCHEDULES)
    if chunks < 3
]
SLICED = [
    *(f"tensor(2) * {schedule}" for schedule in SCHEDULES),
    "tensor(2) * gpipe(2) * data(2)", "tensor(2) * pipeline(2) * zero(2, level=2)",
    "tensor(2) * interleaved(2) * zero(2, level=1)", "tensor(2) * zero_bubble(2, chunks_per_stage=2) * zero(2, level=2)",
]  # fmt: skip
MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9)


class Pairs(nn.Module):
    """Pairs of layers that may be sliced, each added to what it is given; dropout; one table at both ends."""

    def __init__(self, num_pairs=4):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.pairs = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6), nn.Dropout(0.1)) for _ in range(num_pairs)
        )
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for pair in self.pairs:
            x = x + pair(x)
        return self.head(self.norm(x))


def over_tokens(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def subject(lengths=(12, 7, 3)):
    draw = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, 11, (length, 6), generator=draw) for length in lengths]
    tokens = tuple((batch[:, :-1], batch[:, 1:]) for batch in batches)
    return ParityModel("pairs", lambda: build_seeded(Pairs), tokens, over_tokens)


@cache
def alone(recipe, lengths=(12, 7, 3)):
    return parity.train(subject(lengths), plan_for("solo", recipe.num_microbatches), recipe)


def max_error(strategy, recipe, lengths=(12, 7, 3)):
    """Return the largest relative difference of any parameter or loss from those of the model alone."""
    run = parity.train(subject(lengths), plan_for(strategy, recipe.num_microbatches), recipe)
    expected = alone(recipe, lengths)
    assert run.losses == pytest.approx(expected.losses, rel=parity.TOLERANCE)
    return max(parity.relative_difference(run.params[name], param) for name, param in expected.params.items())


@pytest.mark.long
@pytest.mark.parametrize("strategy", SLICED)
def test_slices_inside_the_stages_of_every_order_train_the_same(strategy):
    assert max_error(strategy, TrainConfig(clip_norm=0.3)) <= parity.TOLERANCE


@st.composite
def compositions(draw):
    """A pipeline of some order with something around it, microbatches, and batches of any size."""
    stages = draw(st.integers(2, 4))
    chunks = draw(st.sampled_from([1, 1, 2])) if stages == 2 else 1
    schedule = draw(st.sampled_from([name for name, tested in TESTED_SCHEDULES if tested == chunks]))
    around = draw(st.sampled_from(["", "data(2)", "data(3)", "zero(2, level=1)", "zero(2, level=2)",
                                   "zero(2, level=1) * data(2)"]))  # fmt: skip
    micros = Plan.parse(around or "solo").global_num_microbatches * draw(st.integers(1, 4))
    lengths = tuple(draw(st.lists(st.integers(1, 2 * micros), min_size=1, max_size=2)))
    text = f"pipeline({stages}, schedule={schedule}" + (", chunks_per_stage=2)" if chunks == 2 else ")")
    recipe = TrainConfig(MOMENTUM, micros, draw(st.sampled_from([None, 0.2])), draw(st.booleans()))
    return " * ".join(part for part in (text, around) if part), recipe, (2 * micros, *lengths)


@given_few_or_many(2, 10, compositions())
def test_any_composition_trains_the_same_on_batches_of_any_size(case):
    assert max_error(*case) <= parity.TOLERANCE


@pytest.mark.long(quick=["pipeline(2, schedule=gpipe, chunks_per_stage=2)- * data(2)"])
@pytest.mark.parametrize(("schedule", "around"), each_value_once(SCHEDULES, ["", " * data(2)", " * zero(2, level=2)"]))
def test_clipped_numbers_and_a_schedule_of_rates_come_out_the_same(schedule, around):
    how = {"clip_norm": 0.5, "clip_value": 0.02, "lr_scheduler": partial(optim.lr_scheduler.StepLR, step_size=2)}
    mine, history = fit(f"{schedule}{around}", deep(), epochs=2, progress="off", optimizer=MOMENTUM, **how)
    theirs, expected = fit("solo", deep(), epochs=2, progress="off", optimizer=MOMENTUM, **how)
    assert max_difference(mine, theirs) <= parity.TOLERANCE
    assert [step.options["lr"] for step in history.steps] == [step.options["lr"] for step in expected.steps]


def deep():
    """Seven blocks, and nothing that looks at more than one sample."""

    def build():
        widths = (6, 8, 8, 8, 8, 8)
        layers = [layer for width in widths for layer in (nn.Linear(width, 8), nn.Tanh(), nn.Dropout(0.1))]
        return nn.Sequential(*layers, nn.Linear(8, 3))

    return build_seeded(build)
