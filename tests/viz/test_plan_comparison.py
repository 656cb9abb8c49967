"""The page about a choice of a plan: a table, and timelines on one scale."""

import re

import pytest

from counterpoint.viz.page import StatCard
from counterpoint.viz.plan_comparison import ComparedPlan, PlanComparison, write_comparison_page
from counterpoint.viz.report import write_report
from counterpoint.viz.svg_timeline import draw_plans
from tests.viz.html_validity import find_html_errors
from tests.viz.sample_traces import REAL, UNIT, report
from tests.viz.test_report import ATTACK, Nesting

ROWS = (("pipeline(2)", "6 s", ""), ("data(2)", "9 s", "3 s more of waiting"))
WEIGHING = PlanComparison(
    ("pipeline(2) is taken",),
    ("plan", "step", "why not"),
    ROWS,
    frozenset({"plan", "why not"}),
    (ComparedPlan("pipeline(2)", UNIT, REAL), ComparedPlan("data(2)", UNIT)),
)


def page(weighing=WEIGHING):
    return write_comparison_page("counterpoint plan", "digits on 2 ranks", (StatCard("plan", "pipeline(2)"),), weighing)


def test_a_page_has_the_table_the_best_plans_and_what_was_measured():
    seen = Nesting(page())
    assert seen.text["h2"] == ["Plans that were compared", "One step under the best plans, simulated",
                               "Predicted and measured"]  # fmt: skip
    assert seen.text["td"][:2] == ["pipeline(2)", "6 s"]
    assert [tag for tag, _ in seen.seen].count("svg") == 2, "one of all plans, one of the plan that was measured"


def test_sections_without_measurements_or_timelines_are_omitted():
    bare = PlanComparison(WEIGHING.explanation, WEIGHING.titles, ROWS)
    assert Nesting(page(bare)).text["h2"] == ["Plans that were compared"]


def test_plans_are_drawn_on_one_scale_each_under_its_name():
    drawing = draw_plans([("one", UNIT), ("other", UNIT)])
    names = re.findall(r'font-weight="600">([^<]*)<', drawing)
    assert [name.split(":")[0] for name in names] == ["one", "other"]
    assert drawing.count("6.0") == 2 or drawing.count(">6 s<") == 2


def test_plans_that_take_far_longer_have_a_scale_of_their_own_and_say_so():
    assert draw_plans([("fast", REAL), ("slow", UNIT)]).count("on a scale of its own") == 2


@pytest.mark.parametrize("text", [page(), write_report(report()), write_report(report(plan_comparison=WEIGHING))])
def test_pages_keep_the_syntax_of_html(text):
    assert find_html_errors(text) == []


def test_the_validator_finds_what_is_wrong():
    assert [code for _, code in find_html_errors("<!doctype html><title>a</title><p><div></p></div>")] == [
        "unexpected-end-tag"
    ]


def test_names_of_plans_are_text():
    attacked = PlanComparison((ATTACK,), ("plan",), ((ATTACK,),), plans=(ComparedPlan(ATTACK, UNIT, REAL),))
    seen = Nesting(page(attacked))
    assert "script" not in {tag for tag, _ in seen.seen}
    assert not {name for _, given in seen.seen for name in given if name.startswith("on")}
