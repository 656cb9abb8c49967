"""On any topology, one rank of each class gives the trace of all, to the last bit."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from counterpoint.errors import PlanError
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.simulate import find_representatives, simulate, simulate_every_rank
from counterpoint.world.cluster import Cluster, Device, Level, Link
from tests.simulator.programs import compile_text, size_fn_for
from tests.simulator.test_symmetry import PLANS

LATENCIES, RATES = st.sampled_from([0.0, 1e-4]), st.sampled_from([1e7, 1e8, 3e8])
PARTS = st.sampled_from([0.25, 0.5, 1.0])


@st.composite
def clusters(draw):
    """Clusters of up to three levels, some with contention, some with slow ranks and links."""
    levels = tuple(
        Level(f"level {at}", draw(st.integers(1, 4)), Link(draw(LATENCIES), draw(RATES)), draw(st.booleans()))
        for at in range(draw(st.integers(0, 3)))
    )
    return Cluster(
        device=Device(cost_per_s=1e4),
        link=Link(draw(LATENCIES), draw(RATES)),
        speeds=draw(st.sampled_from([(), (), (0.5,), (1.0, 2.0, 1.0)])),
        levels=levels,
        compute_contention=draw(st.sampled_from([(), (1.0, 0.9, 0.6), (1.0, 0.5)])),
        slow_links=draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), PARTS), max_size=1).map(tuple)),
    )


def costs_on(compiled, cluster):
    return analytic_costs(compiled.model, cluster, size_fn_for(compiled), samples_per_microbatch=2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(PLANS), clusters(), st.sampled_from([(), ("overlap",)]), st.integers(1, 4))
def test_one_rank_of_each_class_gives_the_trace_of_all_on_any_cluster(plan, cluster, passes, m):
    try:
        compiled = compile_text(plan, m=m, passes=passes)
    except PlanError:
        return
    costs = costs_on(compiled, cluster)
    assert simulate(compiled.program, costs, cluster) == simulate_every_rank(compiled.program, costs, cluster)


HOSTS = Cluster(levels=(Level("host", 2, Link()), Level("network", 4, Link(1e-4, 1e8), is_shared=True)))


@pytest.mark.parametrize(
    ("plan", "cluster", "representatives"),
    [
        ("data(8)", HOSTS, [0] * 8),
        ("pipeline(2) * data(4)", HOSTS, [0, 1] * 4),
        ("pipeline(2) * data(2)", replace(HOSTS, levels=(Level("host", 3, Link()), HOSTS.levels[1])), [0, 1, 2, 3]),
        ("data(8)", replace(HOSTS, slow_links=((1, 3, 0.5),)), [0] * 6 + [6] * 2),
        ("data(4)", Cluster(speeds=(1.0, 0.5)), [0, 1, 0, 0]),
        ("data(4)", replace(HOSTS, speeds=(1.0, 0.5)), [0, 1, 2, 2]),
        ("data(3)", HOSTS, [0, 0, 2]),
    ],
)
def test_ranks_are_equal_if_they_and_their_neighbours_are(plan, cluster, representatives):
    compiled = compile_text(plan, m=2).program
    assert list(find_representatives(compiled, compiled.unroll(1), cluster).representative) == representatives


def test_represented_ranks_contend_as_well():
    """Four data replicas on two hosts: one represents all, and their two reductions share each NIC."""
    compiled = compile_text("tensor(2) * data(2)", blocks=1)
    apart, shared = (
        replace(HOSTS, levels=(HOSTS.levels[0], replace(HOSTS.levels[1], is_shared=shared))) for shared in (False, True)
    )
    sums = [
        max(
            event.seconds
            for event in simulate(compiled.program, costs_on(compiled, one), one).events
            if "grad" in event.text
        )
        for one in (apart, shared)
    ]
    assert sums[1] == pytest.approx(2 * sums[0] - 2 * 1e-4)
