"""Tree reductions: which replica sends to which, and when."""

import pytest

from counterpoint.compiler.compile import message_size_fn
from counterpoint.model.spec import linear_chain
from counterpoint.program.text import format_program
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.tree_reduce import TreeReduce
from counterpoint.world.cluster import Cluster, Device
from tests.program.verify.random_plans import compile_text

BLOCKS = 12


@pytest.mark.parametrize(
    ("shape", "parents"),
    [
        ("binomial", [0, 0, 2, 0, 4, 4, 6]),
        ("star", [0, 0, 0, 0, 0, 0, 0]),
        ("chain", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_every_copy_but_the_first_has_one_above_it_and_is_below_that_one(shape, parents):
    tree = TreeReduce(8, shape)
    assert [tree.parent(copy) for copy in range(1, 8)] == parents
    assert {copy: tree.children(copy) for copy in range(8)} == {
        copy: tuple(child for child, parent in enumerate(parents, 1) if parent == copy) for copy in range(8)
    }


def test_no_receive_of_a_gradient_follows_an_all_reduce_that_waits_for_others():
    """The receive stood behind the sum of the tied weight, and two stages and their copies waited in a circle."""
    compiled = compile_text("pipeline(2) * tree(2, send=during_backward)", m=2, tied=True, blocks=5)
    behind_backwards = format_program(compiled.program).splitlines()[1].split("g1.1>0 ")[1]
    assert behind_backwards.startswith("grad3<3 grad2<3 all_reduce(grad0+4)@0,1 grad0+4<3 commit@0-3")


def seconds(text):
    """How long a step takes where backwards and messages take about as long."""
    compiled = compile_text(text, blocks=BLOCKS)
    cluster = Cluster(Device(cost_per_s=30_000))
    costs = analytic_costs(compiled.model, cluster, message_size_fn(linear_chain(BLOCKS), 1), samples_per_microbatch=8)
    return max(event.stop_s for event in simulate(compiled.program, costs).events)


@pytest.mark.parametrize("shape", ["binomial", "chain"])
def test_gradients_that_are_handed_on_early_make_a_step_shorter(shape):
    assert seconds(f"tree(4, shape={shape}, send=during_backward)") < 0.9 * seconds(f"tree(4, shape={shape})")


def test_a_chain_hides_more_of_its_messages_than_a_star_whose_first_copy_takes_all():
    assert seconds("tree(4, shape=chain, send=during_backward)") < seconds("tree(4, shape=star, send=during_backward)")
