"""The option compile=: its texts, in plans and their files, and what is wrong with others."""

import re

import pytest

import counterpoint as cp
from counterpoint.model.compilation import Compilation, parse_compilation
from counterpoint.model.option_text import merge_option
from counterpoint.plan.plan import Plan
from counterpoint.training.agreement.rank_facts import describe_options, first_difference
from counterpoint.training.options import TrainingOptions, use_plan_options
from counterpoint.training.plan_resolution import RequestedPlan

TEXTS = [
    "segments",
    "blocks",
    "blocks(backend=aot_eager)",
    "segments(mode=max-autotune)",
    "segments(backend=a.b, mode=c)",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_written_as_it_is_read(text):
    assert str(parse_compilation(text)) == text


def test_spaces_and_defaults_are_left_out():
    assert str(parse_compilation(" segments( backend = inductor ) ")) == "segments"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("all", "compile='all' is not one of segments, blocks, or None"),
        (True, "compile=True is a bool; give 'segments', 'blocks', a text such as"),
        ("segments(", "compile='segments(' cannot be read; give 'segments'"),
        (
            "segments(dynamic=true)",
            "'dynamic=true' is not an option of it, or there twice; the options are backend=...",
        ),
        ("segments(backend=)", "backend='' is not a name; give one that torch.compile knows"),
        ("blocks(mode=a b)", "mode='a b' is not a name"),
    ],
)
def test_another_value_is_refused(value, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        TrainingOptions(compile=value)


def test_a_plan_file_has_it():
    text = "plan:\n  strategy: data(2)\n  compile: blocks(backend=eager)\n"
    plan = Plan.from_yaml(text)
    assert plan.compile == Compilation("blocks", "eager")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert use_plan_options(TrainingOptions(), plan).compile == plan.compile
    with pytest.raises(cp.PlanError, match=r"plan.yaml:3: compile='often' is not one of"):
        Plan.from_yaml(text.replace("blocks(backend=eager)", "often"), "plan.yaml")


def test_option_and_plan_may_not_contradict_each_other():
    assert merge_option("compile", None, Compilation("blocks")) == merge_option("compile", Compilation("blocks"), None)
    with pytest.raises(cp.PlanError, match="compile=segments was given, but the plan has compile blocks; give one"):
        merge_option("compile", Compilation("segments"), Compilation("blocks"))


def test_ranks_compare_it():
    facts = [describe_options(TrainingOptions(compile=value)) for value in ("segments", Compilation("segments"), None)]
    assert facts[0] == facts[1]
    assert first_difference([facts[0], facts[2]]).startswith("the option compile is segments on rank 0, None on rank 1")
    plans = (Plan(compile=Compilation("blocks")), Plan())
    own, theirs = (RequestedPlan(plan).describe(plan, None) for plan in plans)
    assert first_difference([own, theirs]).startswith("the compile of the plan is blocks on rank 0, None on rank 1")
