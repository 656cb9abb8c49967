"""Wherever ranks stand, one rank of each class gives the trace of all, to the last bit."""

from hypothesis import given, settings, strategies as st

from counterpoint.errors import PlanError
from counterpoint.simulator.costs import model_costs
from counterpoint.simulator.simulate import simulate, simulate_every_rank
from counterpoint.world.cluster import Cluster, Device, Level, Link
from tests.simulator.played import compiled, size_of_in
from tests.simulator.test_symmetry import PLANS

LATENCIES, RATES = st.sampled_from([0.0, 1e-4]), st.sampled_from([1e7, 1e8, 3e8])
PARTS = st.sampled_from([0.25, 0.5, 1.0])


@st.composite
def clusters(draw):
    """Clusters of up to three levels, some of them crowded, some with slow ranks and links."""
    levels = tuple(
        Level(f"level {at}", draw(st.integers(1, 4)), Link(draw(LATENCIES), draw(RATES)), draw(st.booleans()))
        for at in range(draw(st.integers(0, 3)))
    )
    return Cluster(
        device=Device(cost_per_s=1e4),
        link=Link(draw(LATENCIES), draw(RATES)),
        speeds=draw(st.sampled_from([(), (), (0.5,), (1.0, 2.0, 1.0)])),
        levels=levels,
        crowding=draw(st.sampled_from([(), (1.0, 0.9, 0.6), (1.0, 0.5)])),
        slow_links=draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), PARTS), max_size=1).map(tuple)),
    )


def costs_on(made, cluster):
    return model_costs(made.model, cluster, size_of_in(made), samples_per_micro=2)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLANS), clusters(), st.sampled_from([(), ("overlap",)]), st.integers(1, 4))
def test_one_rank_of_each_class_gives_the_trace_of_all_on_any_cluster(plan, cluster, passes, m):
    try:
        made = compiled(plan, m=m, passes=passes)
    except PlanError:
        return
    costs = costs_on(made, cluster)
    assert simulate(made.program, costs, cluster) == simulate_every_rank(made.program, costs, cluster)
