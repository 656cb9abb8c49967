"""Reports in headless Chromium: they open, request nothing, and show the timelines."""

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from tests.browser.chromium import browsing, find_chromium
from tests.viz.html_validity import find_html_errors

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium; Debian has it as chromium"),
]
HEADINGS = "[...document.querySelectorAll('h2')].map(h => h.textContent)"
SHOWN = """[...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const bars = [...svg.querySelectorAll('rect')].filter(bar => bar.getBoundingClientRect().width > 0);
  return {title: svg.querySelector('title').textContent, wide: box.width, high: box.height, bars: bars.length};
})"""


def run(*words):
    result = CliRunner().invoke(build_app([words[0]]), [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def seen(page, tmp_path):
    """Headings and timelines of a page that was opened, captured, and found to be valid and self-contained."""
    with browsing(tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        actual = browser.value(HEADINGS), browser.value(SHOWN)
        browser.photograph(tmp_path / "report.png")
        assert (browser.requests(), browser.complaints()) == ([page.as_uri()], [])
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert find_html_errors(page.read_text()) == []
    return actual


def drawn(timelines, title):
    actual = [one for one in timelines if one["title"] == title]
    return bool(actual) and all(one["wide"] > 300 and one["high"] > 60 and one["bars"] > 4 for one in actual)


def test_the_report_of_a_planned_run_shows_its_step_twice_and_the_best_plans(tmp_path):
    words = ("digits", "--local", "-n", "2", "--strategy", "auto", "--steps", "4", "--batch-size", "16")
    run("train", *words, "--folder", tmp_path / "run", "--progress", "off")
    headings, timelines = seen(tmp_path / "run" / "report.html", tmp_path)
    assert {"One step, simulated and measured", "Plans that were compared"} <= set(headings)
    assert drawn(timelines, "one step, simulated and measured")
    assert drawn(timelines, "one step under 3 plans")


def test_the_page_about_a_choice_shows_the_best_plans_on_one_scale(tmp_path):
    run("plan", "-n", "2", "--blocks", "2", "--report", tmp_path / "plan.html")
    headings, timelines = seen(tmp_path / "plan.html", tmp_path)
    assert headings == ["Plans that were compared", "One step under the best plans, simulated"]
    assert drawn(timelines, "one step under 3 plans")


def test_a_page_that_asks_for_something_is_seen_to(tmp_path):
    (tmp_path / "page.html").write_text("<!doctype html><title>a</title><img src='http://127.0.0.1:9/a.png' alt='a'>")
    with browsing(tmp_path / "profile") as browser:
        browser.open((tmp_path / "page.html").as_uri())
        assert "http://127.0.0.1:9/a.png" in browser.requests()
