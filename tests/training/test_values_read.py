"""Values that the code of a model and of a loss reads, compared between ranks: what is refused, and what is not."""

import logging
import re
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from counterpoint.training.agreement.rank_facts import describe_function, describe_values_read, first_difference
from counterpoint.training.agreement.values_of_code import is_plain

SCALE: Any = 1.0
LOG: Any = None
TABLE: Any = {}
RANK = ContextVar("RANK", default=0)
SIZE = ContextVar("SIZE", default=0)
API_TOKEN = ContextVar("API_TOKEN", default="sesame")
rank_info = SimpleNamespace(index=0)
credentials = SimpleNamespace(value="sesame")
logger = logging.getLogger(__name__)
VERBOSE = IS_MAIN = START_TIME = RUN_ID = LOG_DIR = MASTER_PORT = WORKER_PID = 0
FLAGS = ("VERBOSE", "IS_MAIN", "START_TIME", "RUN_ID", "LOG_DIR", "MASTER_PORT", "WORKER_PID")


class Net(nn.Linear):
    """Reads values of many kinds."""

    count = 0
    offset = 0.0
    verbose = False

    def __init__(self):
        super().__init__(1, 1)
        self.block = self.count + bool(TABLE)

    def forward(self, x):
        x = x * SCALE * SIZE.get() * len(TABLE) + self.shift()
        logger.info("%s %s %s", LOG, logger.level, self.verbose)
        return x + RANK.get() + rank_info.index + len(credentials.value) + len(API_TOKEN.get())

    def shift(self):
        return self.offset + VERBOSE + IS_MAIN + START_TIME + RUN_ID + LOG_DIR + MASTER_PORT + WORKER_PID


def describe(**values):
    """Return what a rank with these globals, or values of context variables, describes."""
    before = {name: globals()[name] for name in values}
    for name, value in values.items():
        globals()[name] = value
    try:
        return describe_values_read(Net(), F.mse_loss)
    finally:
        globals().update(before)


def context(name, value):
    variable = ContextVar(name, default=value)
    return {name: variable}


def made(width):
    class Block(nn.Module):
        size = width

        def forward(self, x):
            return x * width + self.size

    return Block()


def test_several_classes_that_a_function_makes_are_compared_in_the_order_of_the_modules():
    facts = [describe_values_read(nn.Sequential(*map(made, sizes)), F.mse_loss) for sizes in ((4, 8, 4), (4, 8, 5))]
    assert [text for name, text in facts[0] if ".size" in name] == ["4", "8", "4"]
    assert [text for name, text in facts[0] if "variable width" in name] == ["4", "8", "4"]
    assert "made.<locals>.Block.size (3 of 3) is 4 on rank 0, 5 on rank 1" in first_difference(facts)


DIFFERENT = {
    "global": ({"SCALE": 1.0}, {"SCALE": 2.0}, "the global SCALE of .* is 1.0 on ranks 0, 2, 2.0 on rank 1; give the same"),
    "context variable": (context("SIZE", 1), context("SIZE", 2), "the global SIZE of .* is 1 on ranks 0, 2, 2 on rank 1"),
    "dict": ({"TABLE": {"a": 1}}, {"TABLE": {"a": 2}}, "the global TABLE of .* is {'a': 1} on ranks 0, 2, {'a': 2} on"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
def test_another_value_on_one_rank_is_named(what):
    own, other, text = DIFFERENT[what]
    assert re.match(text, first_difference([describe(**own), describe(**other), describe(**own)]))


ALIKE = {
    "None on the others": ({"LOG": "run.log"}, {"LOG": None}),
    "None of a value that is compared": ({"SCALE": 2.0}, {"SCALE": None}),
    "context variable of the rank": (context("RANK", 0), context("RANK", 1)),
    "object of the rank": ({"rank_info": SimpleNamespace(index=0)}, {"rank_info": SimpleNamespace(index=1)}),
    "entry of the rank": ({"TABLE": {"a": 1, "rank": 0}}, {"TABLE": {"a": 1, "rank": 1}}),
    "order of a dict": ({"TABLE": {"a": 1, "b": 2}}, {"TABLE": {"b": 2, "a": 1}}),
    **{name: ({name: 1}, {name: 2}) for name in FLAGS},
}


@pytest.mark.parametrize("what", ALIKE)
def test_values_that_may_differ_are_not_compared(what):
    own, other = ALIKE[what]
    assert first_difference([describe(**own), describe(**other), describe(**own)]) == ""


def test_values_on_some_ranks_only_are_compared_among_these():
    facts = [describe(SCALE=scale) for scale in (None, 1.0, 2.0)]
    assert re.match("the global SCALE of .* is 1.0 on rank 1, 2.0 on rank 2; ", first_difference(facts))


@pytest.mark.parametrize(("name", "is_same"), [("count", True), ("verbose", True), ("offset", False)])
def test_attributes_of_classes_are_compared_if_a_forward_reads_them(monkeypatch, name, is_same):
    own = describe()
    monkeypatch.setattr(Net, name, 1.0)
    difference = first_difference([own, describe()])
    assert difference.startswith(
        "" if is_same else "the class attribute Net.offset is 0.0 on rank 0, 1.0 on rank 1; give"
    )
    assert bool(difference) is not is_same


def test_loggers_are_not_compared(monkeypatch):
    facts = []
    for level in (logging.INFO, logging.WARNING):
        monkeypatch.setattr(logger, "level", level)
        facts.append(describe())
    assert facts[0] == facts[1]
    assert not any("logger" in name for name, _ in facts[0])


def test_secrets_are_not_shown():
    facts = describe(TABLE={"DB_PASS": "sesame", "user": {"pwd": "sesame"}})
    hidden = [name for name, text in facts if text.startswith("digest ")]
    assert [name.split()[2] for name in hidden] == ["API_TOKEN", "TABLE", "credentials"]
    assert "sesame" not in repr(facts)


def test_collections_in_themselves_are_not_compared():
    tree: dict[str, Any] = {"name": "root"}
    tree["parent"] = tree
    assert not is_plain(tree)
    assert is_plain([[1], {"a": (2, "b")}] * 2)
    assert not any("TABLE" in name for name, _ in describe(TABLE=tree))


def test_flags_that_a_loss_reads_may_differ(monkeypatch):
    def loss(output, targets):
        return F.mse_loss(output, targets) * SCALE + VERBOSE

    own = describe_function(loss)
    monkeypatch.setitem(globals(), "VERBOSE", 1)
    assert describe_function(loss) == own
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert describe_function(loss) != own


def make_loss(scale=1.0, verbose=None, logger=None):
    def loss(output, targets, *, debug=verbose):
        if verbose or debug:
            logger.info("called")
        return F.mse_loss(output, targets) * scale

    return loss


def test_flags_in_a_closure_a_default_or_a_partial_may_differ_and_settings_may_not():
    """Only those in globals might: a logger that rank 0 alone has was refused as another loss."""
    own = describe_function(make_loss())
    assert describe_function(make_loss(verbose=True, logger=logging.getLogger("loss"))) == own
    assert describe_function(make_loss(scale=2.0)) != own
    given = [describe_function(partial(make_loss, verbose=verbose)) for verbose in (True, False)]
    assert given[0] == given[1]
    assert describe_function(partial(make_loss, scale=2.0)) not in given


def test_a_variable_of_a_closure_that_is_not_assigned_yet_is_left_out():
    def loss(output, targets):
        return F.mse_loss(output, targets) * later

    text = describe_function(loss)
    later = 2.0
    assert describe_function(loss) != text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("log_target", (True, False)), ("log_input", (True, False)), ("main_weight", (0.5, 1.0)), ("rank", (0.5, 1.5)),
        ("node_weights", (torch.ones(2), torch.zeros(2))), ("debug", ([1], [2])), ("log_scale", (1, 2)),
    ],
)  # fmt: skip
def test_settings_whose_names_resemble_flags_are_compared(name, values):
    first, second = (describe_function(partial(F.cross_entropy, **{name: value})) for value in values)
    assert first != second
