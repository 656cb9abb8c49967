"""Functions on several ranks: imported by name, with JSON and tensors as arguments, never pickled."""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from counterpoint.errors import LaunchError
from counterpoint.launchers import import_path, launch
from counterpoint.launchers.function import read_value, write_value
from tests.launchers import ranks
from tests.launchers.ranks import script


def launch_quietly(fn, count, *args):
    return launch(fn, ranks=count, args=args, on_line=lambda line: None)


@pytest.mark.process
def test_every_rank_returns_its_result_in_order():
    assert launch_quietly(ranks.add, 3, 10, 5) == [15, 16, 17]


@pytest.mark.long
@pytest.mark.process
def test_tensors_go_there_and_back():
    import torch

    first, second = launch_quietly(ranks.doubled, 2, torch.arange(3.0))
    assert torch.equal(first[0], torch.tensor([0.0, 2.0, 4.0]))
    assert second[1] == 1


@pytest.mark.process
def test_a_failed_rank_is_a_launch_error_whose_first_line_names_it():
    with pytest.raises(LaunchError, match=r"^rank 1 failed: ValueError: no data here at .*ranks\.py:\d+"):
        launch_quietly(ranks.fail_on_one, 2)


@pytest.mark.process
def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(
        LaunchError, match="result-0 is a object, which cannot be sent to another process; arguments and"
    ):
        launch_quietly(ranks.give_an_object, 1)


@pytest.mark.process
def test_a_function_of_a_script_is_found_though_its_main_part_does_not_run_again(tmp_path):
    text = """
from counterpoint.launchers import launch
def square(x): return x * x + int(os.environ["RANK"])
if __name__ == "__main__":
    print(launch(square, ranks=2, args=[7]))
"""
    done = subprocess.run([sys.executable, script(tmp_path, text)], capture_output=True, text=True, check=True)
    assert done.stdout == "[49, 50]\n"


@pytest.mark.process
def test_a_script_without_main_guard_gets_an_error_about_it(tmp_path):
    text = "from counterpoint.launchers import launch\ndef f(): pass\nlaunch(f, ranks=1)\n"
    done = subprocess.run([sys.executable, script(tmp_path, text)], capture_output=True, text=True, check=False)
    assert "launch was called inside rank 0 of 1; ranks do not launch ranks" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr


def test_functions_that_no_other_process_can_find_are_known():
    def inner():
        return None

    unknown: list[Callable[..., object]] = [inner, lambda: None, partial(ranks.add, 1), "a".join]
    assert [import_path(fn) for fn in unknown] == [None] * 4
    assert import_path(math.sqrt) == "math:sqrt"
    assert import_path(ranks.echo) == "tests.launchers.ranks:echo"


def test_launching_such_a_function_says_what_to_do():
    with pytest.raises(LaunchError, match=r"it is a lambda, .* define it at the top of a file"):
        launch(lambda: None, ranks=2)


def test_an_argument_that_cannot_travel_is_named_with_its_place():
    with pytest.raises(LaunchError, match=r"args\[0\]\['model'\] is a object, which cannot be sent"):
        launch(ranks.echo, ranks=2, args=[{"model": object()}])


def test_values_round_trip(tmp_path):
    value: object = [1, 2.5, None, True, "ü", (1, [2, ()]), {"a": {"b": []}}, float("inf")]
    write_value(tmp_path, "x", value)
    assert read_value(tmp_path, "x") == value
    assert repr(read_value(tmp_path, "x")) == repr(value)
