import pytest

from counterpoint.plan.registry import STRATEGIES
from tests.cli.test_show import run


def test_the_catalogue_lists_every_strategy():
    listed = run("strategies").output
    assert [name for name in STRATEGIES if f"\n{name} " not in f"\n{listed}"] == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_entry_shows_what_it_costs_its_source_and_a_program(name):
    shown = run("strategies", name)
    assert shown.exit_code == 0
    assert "cost" in shown.output.lower()
    assert "source" in shown.output.lower()
    assert "F0.0" in shown.output
    assert "rank 0" in shown.output


def test_an_unknown_name_is_answered_with_the_nearest():
    shown = run("strategies", "piepline")
    assert shown.exit_code == 1
    assert "did you mean pipeline?" in shown.output
