"""One rank represents its class: the trace equals that of simulating every rank, to the last bit."""

import pytest

from counterpoint.program.program import Program
from counterpoint.program.rank_classes import find_rank_classes
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.simulate import simulate, simulate_every_rank
from tests.covering import each_value_once
from tests.simulator.programs import FakeCosts, build_costs, compile_text, program

PLANS = [
    "solo", "data(3)", "zero1(2)", "zero2(3)", "zero3(2)", "pipeline(3)", "gpipe(4)", "tensor(2)", "bsp(2)", "asp(3)",
    "pipeline(2, replicas=(2,1))", "pipeline(2) * data(3)", "gpipe(2) * zero2(2)", "tensor(2) * data(2)",
    "pipeline(2) * tensor(2)", "pipeline(2) * tensor(2) * data(2)", "zero3(2) * data(2)", "zero1(2) * data(3)",
    "data(2) * server(3, servers=2, consistency=asp)", "pipeline(2) * bsp(2)", "data(2) * asp(2)",
    "ssp(3, staleness=0)", "asp(3, compress=twobit)", "easgd(3, alpha=0.5, tau=1)",
]  # fmt: skip


@pytest.mark.long(
    quick=[
        "easgd(3, alpha=0.5, tau=1)-('overlap',)-True",
        "asp(3, compress=twobit)-()-False",
        "data(2) * server(3, servers=2, consistency=asp)-()-False",
        "ssp(3, staleness=0)-('overlap',)-True",
        "gpipe(2) * zero2(2)-()-False",
        "pipeline(2) * bsp(2)-('overlap',)-True",
        "zero1(2) * data(3)-('overlap',)-True",
        "zero3(2)-()-False",
    ]
)
@pytest.mark.parametrize(("plan", "passes", "tied"), each_value_once(PLANS, [(), ("overlap",)], [False, True]), ids=str)
def test_one_rank_of_each_class_gives_the_trace_of_all(plan, passes, tied):
    compiled = compile_text(plan, m=4, tied=tied, passes=passes)
    for costs in (
        unit_costs(backward_ticks=2),
        build_costs(compiled),
        build_costs(compiled, latency_s=0.0),
        FakeCosts(link_s=0.5),
    ):
        assert simulate(compiled.program, costs) == simulate_every_rank(compiled.program, costs)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("data(4)", ((0, 1, 2, 3),)),
        ("pipeline(2) * data(2)", ((0, 2), (1, 3))),
        ("tensor(2)", ((0, 1),)),
        ("pipeline(2, replicas=(2,1))", ((0,), (1,), (2,))),
        ("asp(2)", ((0,), (1,), (2,))),
    ],
)
def test_the_classes_of_a_plan_are_these(plan, expected):
    assert find_rank_classes(compile_text(plan, m=2).program) == expected


def test_equal_rank_programs_are_of_two_classes_if_their_senders_differ():
    rows = ["F0.0 x1.0>2", "F0.1 F0.2 x1.1>3", "x1.0<0", "x1.1<1"]
    assert find_rank_classes(program(*rows)) == ((0,), (1,), (2,), (3,))


def test_a_distant_difference_propagates_through_the_ranks_between():
    chains = [["F0.0 x1.0>1", "x1.0<0 x2.0>2", "x2.0<1"], ["F0.1 F0.1 x1.1>4", "x1.1<3 x2.1>5", "x2.1<4"]]
    assert len(find_rank_classes(program(*chains[0], *chains[1]))) == 6


def test_a_class_whose_ranks_request_one_link_at_the_same_moment_is_simulated_rank_by_rank():
    """Four ranks in a circle of started pairs: equal rank programs, but one of the pairs comes first."""
    circle = [
        f"all_reduce_start(grad0)@{min(a, b)},{max(a, b)} all_reduce_start(grad0)@{min(z, a)},{max(z, a)} "
        f"all_reduce_wait(grad0)@{min(a, b)},{max(a, b)} all_reduce_wait(grad0)@{min(z, a)},{max(z, a)}"
        for z, a, b in [(3, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 0)]
    ]
    looped = program(*circle)
    assert len(find_rank_classes(looped)) == 1
    trace = simulate(looped, FakeCosts(link_s=2))
    assert trace == simulate_every_rank(looped, FakeCosts(link_s=2))
    assert trace.step_s > 2


def test_an_async_pipeline_is_simulated_with_one_body():
    stream = program("F0.0 | F0.+1 B0.+0 | B0.+0")
    assert isinstance(stream, Program)
    assert [event.text for event in simulate(stream, FakeCosts()).events] == ["F0.0", "F0.1", "B0.0", "B0.1"]
