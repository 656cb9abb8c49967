"""The registry of strategies, and earlier names of strategies and options."""

from typing import Any

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.plan.registry import STRATEGIES, find_strategy
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.renamed import RENAMED
from counterpoint.strategies.tree_reduce import TreeReduce


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_finds_its_line_and_the_line_says_what_it_is(name):
    named = find_strategy(name)
    assert named.summary == named.summary.strip(". ")
    assert len(named.summary.split()) >= 3
    assert "Cost:" in (named.doc_source.__doc__ or "")


SLIPS = [("zeroo3", "zero3"), ("pipline", "pipeline"), ("ASP", "asp"), ("slo", "solo")]


@pytest.mark.parametrize(("wrong", "near"), SLIPS)
def test_a_name_with_a_slip_of_the_pen_finds_the_nearest(wrong, near):
    with pytest.raises(PlanError, match=f"there is no strategy '{wrong}'; did you mean {near}\\?"):
        find_strategy(wrong)


EARLIER_TEXTS = [
    ("pipeline(2, order=gpipe)", "order"),
    ("one_f_one_b(2, order=gpipe)", "order"),
    ("interleaved(2, order=gpipe)", "order"),
    ("gpipe(2, virtual=2)", "virtual"),
    ("pipedream(2, cuts=block1)", "cuts"),
    ("tree(2, sends=early)", "sends"),
    ("tree(2, send=early)", "send=early"),
    ("tree(2, send=last)", "send=last"),
    ("data(2, update=own)", "update=own"),
    ("data(2, update=shared)", "update=shared"),
    ("easgd(2, part=0.5)", "part"),
    ("easgd(2, every=4)", "every"),
    ("asp(2, fetch_every=3)", "fetch_every"),
    ("elastic(2)", "elastic"),
]


def test_every_earlier_name_is_tried():
    assert {old for _, old in EARLIER_TEXTS} == RENAMED.keys() - {"timing"}  # a key of plan files: test_source.py


@pytest.mark.parametrize(("text", "old"), EARLIER_TEXTS)
def test_an_earlier_name_is_refused_with_its_present_one(text, old):
    with pytest.raises(PlanError, match=f"; {old} is now called {RENAMED[old]}"):
        Plan.parse(text)


@pytest.mark.parametrize(("text", "old"), EARLIER_TEXTS)
def test_a_plan_file_with_an_earlier_name_is_refused_with_its_line(text, old):
    with pytest.raises(PlanError, match=rf"^plan\.yaml:2: .*; {old} is now called {RENAMED[old]}"):
        Plan.from_yaml(f"plan:\n  strategy: {text}\n", "plan.yaml")


@pytest.mark.parametrize(
    ("strategy", "old", "new"),
    [
        (Pipeline, "order", "schedule"),
        (Pipeline, "virtual", "chunks_per_stage"),
        (Pipeline, "cuts", "split_points"),
        (TreeReduce, "sends", "send"),
    ],
)
def test_a_call_with_an_earlier_parameter_is_refused_with_its_present_name(strategy, old, new):
    former: Any = {old: 1}
    unknown: Any = {"colour": 1}
    with pytest.raises(PlanError, match=f"^{strategy.__name__} has no parameter {old}; {old} is now called {new}$"):
        strategy(2, **former)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        strategy(2, **unknown)


def test_every_present_name_is_known():
    options = {option for entry in STRATEGIES.values() for option in entry.options}
    known = options | STRATEGIES.keys() | {"profile"}
    assert {new.partition("=")[0] for new in RENAMED.values()} <= known
    assert not (RENAMED.keys() - {"timing"}) & known
