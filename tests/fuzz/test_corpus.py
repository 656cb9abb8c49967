"""What fuzzing has found, and right inputs, read again: only the package's own errors, and nothing runs code."""

import pytest

from tests.fuzz.fuzz import Watch, corpus, read_once
from tests.fuzz.readers import READERS


@pytest.fixture(scope="module")
def watch():
    """One audit hook for all tests, because Python cannot remove it."""
    return Watch()


@pytest.mark.parametrize("name", READERS)
def test_inputs_kept_of_fuzzing_are_read_or_refused_and_run_nothing(watch, name):
    inputs = corpus(name)
    assert inputs
    READERS[name].read(inputs[0])
    for raw in READERS[name].examples():
        read_once(name, raw, watch)  # imports what it needs, and evaluates annotations of the source
    assert not [problem for raw in inputs if (problem := read_once(name, raw, watch))]


def test_the_watch_notices_code_that_data_runs(watch):
    with watch.on() as events:
        eval("1")  # the event that no reader may cause
    assert {event.split()[0] for event in events} == {"compile", "exec"}
