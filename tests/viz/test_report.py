import re
from html.parser import HTMLParser

import pytest

from counterpoint.program.program import Program, RankProgram
from counterpoint.program.text import parse_program
from counterpoint.viz.report import EvaluationPoint, ReportHeading, StepTimelines, TrainingCurves, write_report
from tests.viz.sample_traces import REAL, UNIT, report

VOID = {"meta"}


class Nesting(HTMLParser):
    """Fails on mismatched tags; collects the tags and their text."""

    def __init__(self, page):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert {"svg"} & set(self.open), f"<{tag}/> closes itself in SVG only"
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def test_a_report_nests_and_has_its_sections_in_order():
    page = Nesting(write_report(report()))
    assert page.text["h1"] == ["digits"]
    assert page.text["h2"] == [
        "Training", "Held-out data", "Program", "One step, simulated and measured", "Configuration",
    ]  # fmt: skip
    assert [tag for tag, _ in page.seen].count("svg") == 4


def test_a_report_is_a_page_of_its_own_that_loads_and_runs_nothing():
    text = write_report(report())
    assert text.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')
    assert set(re.findall(r"https?:[^\"'\s<]*", text)) == {"http://www.w3.org/2000/svg"}
    page = Nesting(text)
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe", "object", "base"}
    assert not {name for _, given in page.seen for name in given if name in {"src", "href"} or name.startswith("on")}
    assert not re.search(r"url\(|@import", text)


ATTACK = '<script>alert(\'x\')</script>" onload="x" &amp; \x00\x9b\u202e'


def test_text_from_outside_is_text_everywhere():
    data = report(
        heading=ReportHeading(ATTACK, ATTACK, ATTACK, ATTACK),
        configuration=ATTACK,
        curves=TrainingCurves(((0, 1.0),), (), (EvaluationPoint(0, ((ATTACK, 1.0),)),)),
        timelines=StepTimelines(UNIT, REAL, ATTACK),
    )
    page = Nesting(write_report(data))
    assert "script" not in {tag for tag, _ in page.seen}
    assert page.text["h1"] == page.text["title"][:1] == [re.sub("[\x00\x9b\u202e]", "\ufffd", ATTACK)]
    assert not {name for _, given in page.seen for name in given if name.startswith("on")}


def test_figures_have_names_values_and_units():
    page = Nesting(write_report(report()))
    assert (page.text["dt"], page.text["small"]) == (["accuracy", "throughput"], ["samples/s"])
    assert [text.strip() for text in page.text["dd"]] == ["0.9722", "812.4"]


@pytest.mark.parametrize(
    ("reason", "status"), [("", "finished"), ("rank 1 fell silent", "ended early: rank 1 fell silent")]
)
def test_a_report_says_how_the_run_ended(reason, status):
    page = Nesting(write_report(report(heading=ReportHeading("digits", "data(2)", reason))))
    assert status in page.text["p"]


def test_held_out_loss_is_in_the_chart_and_all_metrics_in_the_table():
    page = Nesting(write_report(report()))
    assert page.text["th"] == ["step", "loss", "accuracy"]
    assert page.text["td"] == ["2", "1.3", "0.9722"]
    assert "held out 1.3" in page.text["text"]


def test_many_steps_have_a_moving_average_and_many_evaluations_are_truncated():
    held_out = tuple(EvaluationPoint(step, (("accuracy", 0.5),)) for step in range(30))
    loss = tuple((float(step), 1.0 / (step + 1)) for step in range(400))
    page = Nesting(write_report(report(curves=TrainingCurves(loss, (), held_out))))
    assert [text.rsplit(" ", 1)[0] for text in page.text["text"] if text.startswith(("each", "mean"))] == [
        "mean of 10",
        "each step",
    ]
    assert "10 earlier evaluations are not shown." in page.text["p"]


def test_instructions_have_the_colour_of_their_kind():
    text = write_report(report())
    assert '<span class="forward">F0.0</span> <span class="communication">x1.0&gt;1</span>' in text
    assert '<span class="backward">B0.1</span> <span class="update">U0</span>' in text


def test_empty_sections_are_omitted():
    data = report(stat_cards=(), curves=TrainingCurves(), timelines=StepTimelines(), configuration="")
    page = Nesting(write_report(data))
    assert page.text["h2"] == ["Program"]
    assert "svg" not in {tag for tag, _ in page.seen}


def test_a_run_of_a_thousand_ranks_has_a_small_report():
    rank_program = RankProgram(
        parse_program(" ".join(f"F0.{micro} B0.{micro}" for micro in range(50))).rank_programs[0].body
    )
    text = write_report(report(program=Program((rank_program,) * 1024)))
    assert len(text) < 200_000
    assert "1008 more ranks" in text
