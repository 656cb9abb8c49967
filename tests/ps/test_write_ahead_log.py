import time

import pytest

from counterpoint.errors import CheckpointError
from counterpoint.fabric.frames import HEADER_BYTES
from counterpoint.ps.message_codec import encode_message
from counterpoint.ps.messages import DataTask, ShardReplicas
from counterpoint.ps.write_ahead_log import (
    LeaseExpired,
    LogRecord,
    MemberJoined,
    MemberLeft,
    ReplicasAssigned,
    TaskAssigned,
    TaskReported,
    decode_log,
    encode_record,
)
from tests.ps.message_examples import PUSH

LINES: list[LogRecord] = [
    MemberJoined("worker-1", "worker", 99, 3, ""),
    ReplicasAssigned(0, ShardReplicas("a", "b", True)),
    TaskAssigned("worker-1", 0, DataTask(0, 0, 2)),
    TaskAssigned("worker-1", 1, None),
    TaskReported("worker-1", 2, DataTask(0, 0, 2), "done", 4, ""),
    LeaseExpired(DataTask(0, 2, 4)),
    MemberLeft("worker-1"),
]
RAW = b"".join(encode_record(line) for line in LINES)


def test_lines_come_back_as_they_were():
    assert decode_log(RAW) == (LINES, len(RAW))


def test_an_entry_with_tensors_comes_back():
    (entry,), _ = decode_log(encode_record(PUSH))
    assert entry.header == PUSH.header
    assert [one.tolist() for one in encode_message(entry)[2]] == [one.tolist() for one in encode_message(PUSH)[2]]


def test_wherever_a_log_is_torn_the_whole_lines_before_are_there():
    ends = [sum(len(encode_record(line)) for line in LINES[:count]) for count in range(len(LINES) + 1)]
    for size in range(0, len(RAW), 7):
        lines, kept = decode_log(RAW[:size])
        assert kept == max(end for end in ends if end <= size)
        assert lines == LINES[: ends.index(kept)]


def test_zeros_at_the_end_are_snapshot_off():
    assert decode_log(RAW[:-30] + bytes(30))[0] == LINES[:-1]


def test_damage_before_whole_lines_is_no_crash_and_is_said():
    with pytest.raises(CheckpointError, match="damaged at byte 0"):
        decode_log(RAW[:60] + bytes([RAW[60] ^ 1]) + RAW[61:])


def test_a_log_of_beginnings_of_records_is_refused_in_the_time_that_reading_it_takes():
    """Each was read to the end of the log: 20,000 headers and a megabyte took 20 gigabytes of copies."""
    record = encode_record(TaskReported("worker-1", 2, DataTask(0, 0, 2), "done", 4, "x" * 10**6))
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"damaged at byte 0 of .*, but damaged in many records from byte"):
        decode_log(record[:HEADER_BYTES] * 20_000 + bytes(len(record)))
    assert time.perf_counter() - start < 2
