"""Which cases of a test `make test` runs, and how many examples of a law."""

import re

import pytest
from hypothesis import strategies as st

from tests.covering import given_few_or_many, unmark_quick_cases


@pytest.mark.long(quick=["first", "third"])
@pytest.mark.parametrize("case", ["first", "second", "third"])
def test_cases_that_quick_lists_are_not_long(request, case):
    assert (request.node.get_closest_marker("long") is not None) == (case == "second")


@pytest.mark.long(quick=["fi...", "third"])
@pytest.mark.parametrize("case", ["first", "fifth", "second", "third", "third..."])
def test_a_beginning_with_three_dots_stands_for_all_cases_that_begin_so(request, case):
    assert (request.node.get_closest_marker("long") is not None) == (case in {"second", "third..."})


@pytest.mark.parametrize("name", ["renamed", "renamed..."], ids=["whole", "beginning"])
def test_a_quick_case_that_is_not_there_is_an_error(request, name):
    request.node.add_marker(pytest.mark.long(quick=[name]))
    with pytest.raises(pytest.Collector.CollectError, match=f"has no case {re.escape(name)}; long"):
        unmark_quick_cases([request.node])


@pytest.mark.parametrize("at", [0, 1])
def test_a_law_has_few_examples_or_many(at):
    drawn = []

    @given_few_or_many(3, 9, st.integers())
    def law(number):
        drawn.append(number)

    few, many = law.pytestmark[0].args[1]
    law(examples=[few, *many.values][at])
    assert len(drawn) == [3, 9][at]


def test_only_many_examples_are_long():
    @given_few_or_many(3, 9, st.integers())
    def law(number):
        del number

    few, many = law.pytestmark[0].args[1]
    assert few == 3
    assert [mark.name for mark in many.marks] == ["long"]
