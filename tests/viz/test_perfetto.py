import json
from collections import defaultdict

from hypothesis import strategies as st

from counterpoint.program.trace import LANES, Trace, TraceEvent
from counterpoint.viz.perfetto import format_perfetto
from tests.covering import given_few_or_many
from tests.viz.sample_traces import REAL, UNIT


def events(text, *phases):
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] in phases]


def test_the_file_has_the_fields_that_torch_writes():
    written = json.loads(format_perfetto(UNIT, base_time_ns=17))
    del written["traceEvents"]
    assert written == {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 17,
        "distributedInfo": {"world_size": 2},
    }


def test_a_rank_is_a_process_and_a_lane_is_a_thread():
    names = [(e["name"], e["pid"], e["tid"], e["args"]) for e in events(format_perfetto(UNIT), "M") if e["pid"] == 1]
    assert names == [
        ("process_name", 1, 0, {"name": "rank 1"}),
        ("process_sort_index", 1, 0, {"sort_index": 1}),
        ("thread_name", 1, 0, {"name": "compute"}),
        ("thread_name", 1, 1, {"name": "link"}),
        ("thread_name", 1, 2, {"name": "wait"}),
    ]


def test_an_event_is_complete_and_in_microseconds():
    assert events(format_perfetto(REAL), "X")[0] == {
        "ph": "X", "name": "F0.0 F1.0", "cat": "user_annotation", "pid": 0, "tid": 0, "ts": 0.0, "dur": 4000.0,
        "args": {"index": 0, "kind": "forward"},
    }  # fmt: skip


def test_a_transfer_that_overlaps_computing_is_asynchronous():
    text = format_perfetto(REAL)
    assert [(e["ph"], e["name"], e["ts"]) for e in events(text, "b", "e")] == [
        ("b", "all_reduce_start(grad1)@0,1", 6000.0),
        ("e", "all_reduce_start(grad1)@0,1", 11000.0),
    ]
    assert len({(e["cat"], e["id"], e["pid"]) for e in events(text, "b", "e")}) == 1
    assert "all_reduce_start(grad1)@0,1" not in [e["name"] for e in events(text, "X")]


def test_simulated_and_measured_go_into_one_file_side_by_side():
    written = events(format_perfetto(UNIT, REAL), "M")
    names = {e["pid"]: e["args"]["name"] for e in written if e["name"] == "process_name"}
    places = {e["pid"]: e["args"]["sort_index"] for e in written if e["name"] == "process_sort_index"}
    assert names == {0: "simulated rank 0", 1: "simulated rank 1", 2: "measured rank 0"}
    assert sorted(places, key=lambda pid: places[pid]) == [0, 2, 1]


spans = st.tuples(st.sampled_from(LANES), st.integers(0, 12), st.integers(0, 6))


@given_few_or_many(20, 100, st.lists(spans, max_size=12))
def test_every_event_is_written_once_and_all_that_are_not_asynchronous_nest(result):
    made = [TraceEvent(0, at, f"U{at}", start / 8, (start + length) / 8, lane)
            for at, (lane, start, length) in enumerate(result)]  # fmt: skip
    text = format_perfetto(Trace.from_events(made, 1, "measured"))
    assert sorted(e["name"] for e in events(text, "X", "b")) == sorted(event.text for event in made)
    threads = defaultdict(list)
    for e in events(text, "X"):
        threads[e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for times in threads.values():
        crossing = [(a, b) for a in times for b in times if a[0] < b[0] < a[1] < b[1]]
        assert not crossing
