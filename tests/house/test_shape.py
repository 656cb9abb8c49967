"""Style guide, sections 4 and 6: what fits a sitting, a screen, a test."""

import ast

import pytest

from tests.house.source import FILES, TEST_FILES, all_lines, functions, name_of, num_lines, parsed

NOT_THE_REAL_THING = {"mock", "Mock", "MagicMock", "patch", "sleep"}


@pytest.mark.parametrize("path", [*FILES, *TEST_FILES], ids=name_of)
def test_a_file_fits_a_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, "what are the two subjects in here?"


@pytest.mark.parametrize("path", [*FILES, *TEST_FILES], ids=name_of)
def test_a_function_fits_a_screen(path):
    long = [f"{f.name}:{f.lineno} has {all_lines(f)} lines" for f in functions(path) if all_lines(f) > 60]
    assert not long, "signature and docstring count, too"


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_a_test_shows_one_behaviour(path):
    tests = [f for f in functions(path) if f.name.startswith("test_")]
    assert not [f"{f.name} has {num_lines(f)} lines" for f in tests if num_lines(f) > 20]


@pytest.mark.parametrize("path", TEST_FILES, ids=name_of)
def test_a_test_uses_the_real_thing_and_does_not_sleep(path):
    names = {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(parsed(path))
             if isinstance(node, ast.Name | ast.Attribute)}  # fmt: skip
    assert not names & NOT_THE_REAL_THING, "fakes with behaviour of their own live in counterpoint.testing"


def asserts(function):
    """It has an assert of its own, or expects an exception or a warning."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or any(
        isinstance(call, ast.Attribute) and call.attr in {"raises", "warns", "fail"} for call in calls
    )


def called(function):
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.id if isinstance(call, ast.Name) else call.attr for call in calls
            if isinstance(call, ast.Name | ast.Attribute)}  # fmt: skip


def test_every_test_can_fail():
    everything = [f for path in TEST_FILES for f in functions(path)]
    checking = {f.name for f in everything if asserts(f)} | {"check", "golden"}
    tests = [f for f in everything if f.name.startswith("test_")]
    assert tests
    assert not [f.name for f in tests if not asserts(f) and not called(f) & checking]
