"""A step of a stream is what it adds to a run, which is less than one body from its first word to its last."""

import pytest

from counterpoint.plan import Plan
from counterpoint.planner.rank import foresee, predict
from counterpoint.program.trace import Trace
from counterpoint.simulator.simulate import find_cast, play, simulate_turn
from counterpoint.simulator.spent import spend
from counterpoint.world.cluster import Cluster, Link
from tests.planner.models import layers
from tests.simulator.played import Ticks, compiled

STREAMS = ["pipedream(2)", "pipedream(4)", "pipedream(2, replicas=(2,1))", "pipedream_2bw(3)"]


def run_s(turn, costs, times):
    """The length of a whole run of so many bodies."""
    rows = turn.stream.unroll(times)
    _, clock = play(rows, find_cast(turn.stream, rows), costs)
    return max(stop for spans in clock.spans.values() for _, _, stop, _ in spans)


@pytest.mark.parametrize("link_s", [0.0, 0.5, 2.0, 7.0])
@pytest.mark.parametrize("text", STREAMS)
def test_a_step_of_a_stream_is_what_it_adds_to_a_long_run(text, link_s):
    (turn,), costs = (
        compiled(text, m=6 if "2bw" in text else 2 if "replicas" in text else 1).turns,
        Ticks(link_s=link_s),
    )
    added_s = (run_s(turn, costs, 84) - run_s(turn, costs, 24)) / 60
    (spent,) = spend(turn, [costs])
    assert spent.step_s == pytest.approx(added_s, rel=0.02)
    assert simulate_turn(turn, costs).step_s == spent.step_s


def test_a_trace_of_a_stream_keeps_how_long_a_step_takes():
    (turn,) = compiled("pipedream(2)", m=1).turns
    trace = simulate_turn(turn, Ticks(link_s=2.0))
    assert trace.beat_s is not None
    assert Trace.from_json(trace.to_json()) == trace


def test_what_is_predicted_of_a_stream_is_less_than_its_longest_body():
    plan, model, cluster = Plan.parse("pipedream(4)"), layers(4, width=256, cost=1e9), Cluster(link=Link(1e-3, 1e5))
    found = predict(plan, model, cluster, batch_size=16)
    body = foresee(plan, model, cluster, batch_size=16)
    assert found.step_s == body.step_s < body.span_s
    parts = (found.compute_s, found.communication_s, found.idle_s, found.update_s)
    assert sum(parts) == pytest.approx(found.step_s)
