"""The first line names the root cause, never a consequence."""

import re
import signal
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

import counterpoint.fabric as fabric
from counterpoint.launchers.exit_report import (
    ErrorRecord,
    RankExit,
    exit_code,
    find_root_cause,
    format_report,
    format_stop,
    wait_for_others_s,
)
from counterpoint.launchers.rank_activity import RankActivity, StopTimer, parse_stack


def ended(rank, returncode=1, at=10.0, seconds=4.2, **more):
    return RankExit(rank, 100 + rank, returncode, seconds, at, **more)


def raised(kind, at, *, peer=False, text="went wrong"):
    return ErrorRecord(kind, text, "job.py:40", peer, at)


def test_a_killed_rank_explains_the_peers_that_failed_before_it_was_seen():
    outcomes = [
        ended(0, record=raised("PeerError", 1.0, peer=True)),
        ended(1, -9, at=3.0),
        ended(2, -15, stopped_s=2.0),
    ]
    assert format_report(outcomes).splitlines() == [
        "rank 1 was killed by SIGKILL (pid 101, after 4.2 s); unless a user sent it, the kernel ran out of memory: "
        "see dmesg, use fewer ranks or smaller batches",
        "ranks 0 and 2 stopped because of rank 1: went wrong",
    ]
    assert exit_code(outcomes) == 137


def test_an_exception_explains_peer_errors_that_came_first_in_time():
    outcomes = [ended(0, record=raised("PeerError", 1.0, peer=True)), ended(2, record=raised("ValueError", 2.0))]
    assert format_report(outcomes).splitlines() == [
        "rank 2 failed: ValueError: went wrong at job.py:40",
        "rank 0 stopped because of rank 2",
    ]
    assert exit_code(outcomes) == 1


def test_a_mismatch_is_reported_with_the_location_of_each_rank():
    """Only the one that was stopped first was named, and it was none of the two."""
    text = "ranks 0 and 1 disagree on collective 3 of their group"
    places = {0: "job.py:51", 1: "job.py:60", 2: "job.py:51"}
    records = {rank: ErrorRecord("PeerError", text, place, True, 3.0 - rank) for rank, place in places.items()}
    assert format_report(
        [*(ended(rank, record=record) for rank, record in records.items()), ended(3, -15, stopped_s=2.0)]
    ) == (
        f"ranks 0 and 1 failed: PeerError: {text}\n"
        "ranks 0 and 2 at job.py:51, rank 1 at job.py:60\n"
        "rank 3 stopped because of ranks 0 and 1"
    )


def test_of_two_independent_failures_the_earlier_is_the_cause_and_the_other_is_reported():
    outcomes = [ended(0, record=raised("KeyError", 2.0)), ended(1, record=raised("OSError", 1.0, text="full\ndisk"))]
    assert format_report(outcomes).splitlines() == [
        "rank 1 failed: OSError: full at job.py:40",
        "  disk",
        "also: rank 0 failed: KeyError: went wrong at job.py:40",
    ]


def test_a_crash_on_the_way_out_after_an_exception_does_not_hide_the_exception():
    outcomes = [ended(0, -signal.SIGABRT, record=raised("ValueError", 2.0))]
    assert format_report(outcomes) == "rank 0 failed: ValueError: went wrong at job.py:40"
    assert exit_code(outcomes) == 1


def test_the_same_error_on_many_ranks_is_reported_once():
    outcomes = [ended(rank, record=raised("ValueError", 2.0 + rank)) for rank in range(3)]
    assert format_report(outcomes).splitlines() == [
        "rank 0 failed: ValueError: went wrong at job.py:40",
        "ranks 1 and 2 failed in the same way",
    ]


@pytest.mark.parametrize(("seconds", "wait_s"), [(0.5, 0.25), (4.0, 1.0), (3600.0, 2.0)])
def test_the_wait_for_the_same_exception_on_other_ranks_depends_on_the_run_time(seconds, wait_s):
    """Two ranks were given a wrong batch size; on a busy machine one was stopped before it had seen that itself."""
    assert wait_for_others_s([ended(0, seconds=seconds, record=raised("PlanError", 10.0))]) == wait_s


def test_the_supervisor_waits_briefly_after_a_rank_reports_a_lost_peer():
    peer = raised("PeerError", 11.0, peer=True)
    cause = ended(0, record=raised("ValueError", 10.0))
    assert wait_for_others_s([cause], {1: peer}) == wait_for_others_s([cause, ended(1, record=peer)]) == 0.25
    assert wait_for_others_s([ended(0, -signal.SIGKILL)]) == 0.25
    assert wait_for_others_s([ended(1, record=peer)]) == 1.0  # the cause is still to come
    assert wait_for_others_s([], {1: peer}) == 1.5


def test_an_error_raised_because_we_stopped_the_rank_is_no_cause():
    outcomes = [ended(0, 3, at=5.0), ended(1, record=raised("Terminated", 6.0), stopped_s=5.5)]
    assert find_root_cause(outcomes) is outcomes[0]
    assert format_report(outcomes).splitlines()[0].startswith("rank 0 ended with exit code 3 (pid 100, after 4.2 s)")
    assert exit_code(outcomes) == 3


def test_when_all_blame_their_peers_the_first_one_is_named():
    outcomes = [ended(rank, record=raised("PeerError", 5.0 - rank, peer=True)) for rank in range(3)]
    assert find_root_cause(outcomes) is outcomes[2]


def test_a_rank_that_ended_well_too_early_explains_those_that_waited_for_it():
    waited = raised("PeerError", 9.0, peer=True, text="rank 0 waited 6.0 s at here:1 for ranks 1 and 2 of 3")
    outcomes = [ended(0, record=waited), ended(1, 0, at=1.0), ended(2, 0, at=0.5)]
    assert format_report(outcomes).splitlines() == [
        "rank 2 ended with exit code 0 (pid 102, after 4.2 s), but others waited for it; every rank has to do all of "
        "the steps",
        "rank 0 stopped because of rank 2: rank 0 waited 6.0 s at here:1 for ranks 1 and 2 of 3",
    ]
    assert exit_code(outcomes) == 1


def left(at, location=""):
    return ErrorRecord("", "", location, is_peer=False, time_s=at)


WAITED = "rank 0 waited 0.3 s for barrier of grad0 with ranks 1, 2: rank 1 has closed its fabric"


def test_a_rank_that_left_is_the_cause_though_its_end_was_seen_after_the_error_of_the_one_that_noticed():
    """A process needs longer to end than its peers to notice that its connections are closed."""
    outcomes = [
        ended(0, record=replace(raised("PeerError", 1.0, peer=True, text=WAITED), notes=("in step 7",))),
        ended(1, 0, at=1.4, record=left(0.9, "job.py:12")),
        ended(2, -15, stopped_s=1.5),
    ]
    assert format_report(outcomes).splitlines() == [
        "rank 1 ended with exit code 0 at job.py:12 (pid 101, after 4.2 s), but others waited for it; every rank has to "
        "do all of the steps",
        f"ranks 0 and 2 stopped because of rank 1: {WAITED}, in step 7",
    ]
    assert exit_code(outcomes) == 1


def test_a_rank_that_left_and_was_stopped_while_its_process_ended_is_the_cause():
    waiting = ended(0, record=raised("PeerError", 1.0, peer=True, text=WAITED))
    outcomes = [waiting, ended(1, -15, stopped_s=1.5, record=left(0.9))]
    assert format_report(outcomes).startswith("rank 1 ended with exit code 0 (pid 101")
    assert exit_code(outcomes) == 1
    after_the_signal = ended(1, 0, stopped_s=1.5, record=left(1.7))
    assert find_root_cause([waiting, after_the_signal]) is waiting


def test_the_others_are_stopped_at_once_when_a_rank_has_left_for_which_they_wait():
    peer = raised("PeerError", 1.0, peer=True, text=WAITED)
    assert wait_for_others_s([ended(1, 0)], {0: peer}) == 0.25
    assert wait_for_others_s([], {0: peer, 1: left(0.9)}) == 0.25
    assert wait_for_others_s([ended(3, 0)], {0: peer}) == 1.5


def test_a_rank_that_a_signal_has_stopped_is_the_cause_of_a_timeout():
    waited = "rank 0 waited 8.0 s for barrier of grad0 with ranks 1, 2, 3: the timeout of 8.0 s has passed"
    outcomes = [
        ended(0, record=raised("PeerError", 9.0, peer=True, text=waited)),
        ended(1, stopped_s=10.0, activity=RankActivity("SIGSTOP", 7.6), record=raised("PeerError", 11.0, peer=True)),
        ended(2, -15, stopped_s=10.0, activity=RankActivity(location="wait at fabric.py:3", is_waiting=True)),
        ended(3, -15, stopped_s=10.0, activity=RankActivity(location="read at job.py:7")),
    ]
    first, *_, last = format_report(outcomes).splitlines()
    assert first == (
        "rank 1 was stopped by SIGSTOP for 8 s (pid 101, after 4.2 s), and others waited for it; find what stops it: "
        "`kill -CONT` lets a stopped process go on"
    )
    assert last == f"ranks 0, 2 and 3 stopped because of rank 1: {waited}"
    assert exit_code(outcomes) == 1
    assert find_root_cause([*outcomes[:1], *outcomes[2:]]) is outcomes[3]  # not the one that waits, too
    assert find_root_cause([outcomes[0], outcomes[2]]) is outcomes[0]


STACK = """Current thread 0x00007f (most recent call first):
  File "{data}/lock.py", line 12 in take
  File "{cwd}/job.py", line 40 in read
  File "{cwd}/job.py", line 50 in <module>
"""


def test_a_rank_that_hangs_is_the_cause_with_the_innermost_lines_of_its_stack():
    activity = parse_stack(STACK.format(data=sysconfig.get_path("purelib"), cwd=Path.cwd()))
    waiting = ended(0, record=raised("PeerError", 9.0, peer=True, text=WAITED))
    installed, here = Path(sysconfig.get_path("purelib")), Path.cwd()
    assert format_report([waiting, ended(1, -15, stopped_s=10.0, activity=activity)]).splitlines() == [
        "rank 1 was in read at job.py:40 (pid 101, after 4.2 s), and others waited for it; it hangs there, or needs a "
        "longer timeout",
        f"  take at {installed.relative_to(here) if installed.is_relative_to(here) else installed}/lock.py:12",
        "  read at job.py:40",
        "  <module> at job.py:50",
        f"rank 0 stopped because of rank 1: {WAITED}",
    ]


def test_a_stack_in_the_fabric_is_that_of_a_rank_that_waits():
    assert parse_stack(f'  File "{fabric.__file__}", line 9 in wait').is_waiting
    assert parse_stack("") == RankActivity()


def test_a_stop_is_reported_once_after_ten_seconds():
    timer = StopTimer()
    observations = [("", 0.0), ("SIGSTOP", 1.0), ("SIGSTOP", 10.9), ("SIGSTOP", 11.0), ("SIGSTOP", 30.0), ("", 31.0)]
    assert [timer.observe(*one) for one in observations] == [False, False, False, True, False, False]
    assert not timer.observe("SIGSTOP", 32.0)
    assert timer.observe("SIGSTOP", 42.0)


def test_a_rank_that_ended_well_and_is_not_waited_for_explains_nothing():
    waited = raised("PeerError", 9.0, peer=True, text="rank 0 waited 6.0 s at here:1 for rank 2 of 13")
    outcomes = [ended(0, record=waited), ended(1, 0, at=1.0), ended(3, 0, at=12.0)]
    assert find_root_cause(outcomes) is outcomes[0]


def test_a_run_without_a_failure_has_no_root_cause():
    assert find_root_cause([ended(0, 0), ended(1, 0)]) is None
    assert format_report([ended(0, 0)]) == ""
    assert exit_code([ended(0, 0)]) == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGSEGV, "killed by SIGSEGV .*; native code crashed"),
        (signal.SIGTERM, "killed by SIGTERM .*; something outside this run sent it: a scheduler or a person"),
        (64, "killed by SIGRTMAX"),
    ],
)
def test_a_signal_has_its_name_and_a_remedy(number, text):
    assert re.search(text, format_report([ended(0, -number)]))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": 1}', '{"kind": "E", "time_s": "x"}'])
def test_a_record_that_cannot_be_read_is_no_record(tmp_path, content):
    (tmp_path / "rank-0.json").write_text(content)
    assert ErrorRecord.read(tmp_path / "rank-0.json") is None
    assert ErrorRecord.read(tmp_path / "rank-1.json") is None


def test_the_first_record_of_a_rank_stays(tmp_path):
    path = tmp_path / "rank-0.json"
    raised("ValueError", 1.0).write(path)
    raised("PeerError", 2.0, peer=True).write(path)
    assert ErrorRecord.read(path) == raised("ValueError", 1.0)


def test_a_rank_that_could_not_save_because_it_was_stopped_is_named_and_no_more_time_is_advised():
    outcomes = [ended(0, -9, stopped_s=2.0), ended(1, -9, stopped_s=2.0, activity=RankActivity("SIGSTOP", 3.0))]
    assert format_stop(outcomes, [signal.SIGTERM], [0, 1], 3.0).splitlines() == [
        "stopped by SIGTERM; all 2 ranks have ended",
        "ranks 0 and 1 had not ended 3 s after the signal and were killed: rank 1 was stopped by SIGSTOP, and others "
        "waited for it",
    ]
