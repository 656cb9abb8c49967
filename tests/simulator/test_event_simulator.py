"""The event simulator: waiting, overlap and the order of transfers; in ticks."""

import pytest

from counterpoint.errors import ProgramError
from counterpoint.simulator.simulate import simulate
from tests.simulator.programs import FakeCosts, program


def spans(trace, rank):
    return [(e.text, e.start_s, e.stop_s, e.lane) for e in trace.events if e.rank == rank]


def test_a_rank_computes_while_its_send_is_under_way():
    trace = simulate(program("F0.0 x1.0>1 F0.1", "x1.0<0 F1.0"), FakeCosts(link_s=3))
    assert spans(trace, 0) == [("F0.0", 0, 1, "compute"), ("F0.1", 1, 2, "compute"), ("x1.0>1", 1, 4, "link")]
    assert spans(trace, 1) == [("x1.0<0", 0, 4, "wait"), ("F1.0", 4, 5, "compute")]


def test_two_sends_of_a_rank_share_its_one_link():
    trace = simulate(program("x1.0>1 x1.1>2", "x1.0<0", "x1.1<0"), FakeCosts(link_s=2))
    assert spans(trace, 0) == [("x1.0>1", 0, 2, "link"), ("x1.1>2", 2, 4, "link")]


def test_a_receive_that_comes_late_does_not_wait():
    trace = simulate(program("x1.0>1", "F0.0 F0.1 F0.2 x1.0<0"), FakeCosts(link_s=2))
    assert spans(trace, 1)[-1] == ("x1.0<0", 3, 3, "wait")


def test_a_collective_begins_when_its_last_member_comes():
    trace = simulate(program("all_reduce(grad0)@0,1 U0", "B0.0 all_reduce(grad0)@0,1 U0"), FakeCosts(link_s=2))
    assert spans(trace, 0)[0] == ("all_reduce(grad0)@0,1", 0, 3, "wait")
    assert spans(trace, 0)[1] == ("all_reduce(grad0)@0,1", 1, 3, "link")
    assert trace.step_s == 4


def test_a_started_collective_overlaps_the_next_backward():
    words = "B1.0 all_reduce_start(grad1)@0,1 B0.0 B0.1 all_reduce_wait(grad1)@0,1"
    trace = simulate(program(words, words), FakeCosts(link_s=5))
    assert trace.step_s == 6
    assert spans(trace, 0)[-1] == ("all_reduce_wait(grad1)@0,1", 3, 6, "wait")


def test_the_transfer_that_is_ready_first_gets_the_link_first():
    """A start that waits for a late member must not delay the send after it."""
    rows = [
        "all_reduce_start(grad0)@0,1 x1.0>1 all_reduce_wait(grad0)@0,1",
        "x1.0<0 F1.0 all_reduce_start(grad0)@0,1 all_reduce_wait(grad0)@0,1",
    ]
    trace = simulate(program(*rows), FakeCosts(link_s=2))
    assert ("x1.0>1", 0, 2, "link") in spans(trace, 0)
    assert ("all_reduce_start(grad0)@0,1", 3, 5, "link") in spans(trace, 0)


def test_a_server_applies_pushes_one_after_the_other_as_they_come():
    rows = ["F0.0 push(grad0)>2 pull(weight0)<2", "push(grad0)>2 pull(weight0)<2", "apply_and_reply(0)@0,1"]
    trace = simulate(program(*rows), FakeCosts(link_s=1, server_update_s=(4, 1)))
    serve = "apply_and_reply(0)@0,1"
    assert [span for span in spans(trace, 2) if span[3] == "compute"] == [
        (serve, 1, 5, "compute"),
        (serve, 5, 9, "compute"),
    ]
    assert spans(trace, 1)[-1][2] == 6, "rank 1 pushed first and is answered first"
    assert spans(trace, 0)[-1][2] == 10


def test_ranks_that_wait_for_each_other_are_reported_as_a_deadlock():
    with pytest.raises(ProgramError, match=r"verifier rule 2 violated: deadlock: 2 of 2 ranks"):
        simulate(program("x1.0<1 x1.1>1", "x1.1<0 x1.0>0"), FakeCosts())


def test_a_receive_without_a_send_is_reported_before_the_simulation():
    with pytest.raises(ProgramError, match="deadlock"):
        simulate(program("F0.0", "x1.0<0"), FakeCosts())
