import pytest

from counterpoint.errors import CheckpointError
from counterpoint.server.calls import Keepers, Task
from counterpoint.server.form import to_plain
from counterpoint.server.lines import Assigned, Ended, Given, Gone, Joined, Line, Overdue
from counterpoint.server.log import read_log, record
from tests.server.examples import PUSH

LINES: list[Line] = [
    Joined("worker-1", "worker", 99, 3, ""),
    Assigned(0, Keepers("a", "b", True)),
    Given("worker-1", 0, Task(0, 0, 2)),
    Given("worker-1", 1, None),
    Ended("worker-1", 2, Task(0, 0, 2), "done", 4, ""),
    Overdue(Task(0, 2, 4)),
    Gone("worker-1"),
]
RAW = b"".join(record(line) for line in LINES)


def test_lines_come_back_as_they_were():
    assert read_log(RAW) == (LINES, len(RAW))


def test_an_entry_with_tensors_comes_back():
    (entry,), _ = read_log(record(PUSH))
    assert entry.origin == PUSH.origin
    assert [one.tolist() for one in to_plain(entry)[2]] == [one.tolist() for one in to_plain(PUSH)[2]]


def test_wherever_a_log_is_torn_the_whole_lines_before_are_there():
    ends = [sum(len(record(line)) for line in LINES[:count]) for count in range(len(LINES) + 1)]
    for size in range(0, len(RAW), 7):
        lines, kept = read_log(RAW[:size])
        assert kept == max(end for end in ends if end <= size)
        assert lines == LINES[: ends.index(kept)]


def test_zeros_at_the_end_are_cut_off():
    assert read_log(RAW[:-30] + bytes(30))[0] == LINES[:-1]


def test_damage_before_whole_lines_is_no_crash_and_is_said():
    with pytest.raises(CheckpointError, match="damaged at byte 0"):
        read_log(RAW[:60] + bytes([RAW[60] ^ 1]) + RAW[61:])
