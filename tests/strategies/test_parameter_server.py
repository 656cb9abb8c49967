"""Who keeps which unit, and who talks to whom."""

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import ApplyPushes
from counterpoint.program.text import format_program
from counterpoint.ps.placement import assign
from tests.program.verify.random_plans import compile_text

sizes = st.dictionaries(st.integers(0, 20).map(lambda block: (block,)), st.integers(0, 99), max_size=9)


@given(sizes, st.integers(1, 4))
def test_no_server_has_more_than_the_largest_unit_above_another(result, num_servers):
    owner = assign(result, num_servers)
    load = [sum(result[unit] for unit in owner if owner[unit] == server) for server in range(num_servers)]
    assert owner.keys() == result.keys()
    assert max(load) - min(load) <= max(result.values(), default=0)


def test_equal_units_go_round_the_servers():
    assert assign({(0,): 5, (1,): 5, (2,): 5}, 2) == {(0,): 0, (1,): 1, (2,): 0}


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_server_without_units_is_legal_and_idle(consistency):
    compiled = compile_text(f"{consistency}(2, servers=3)", blocks=1)
    rank_texts = format_program(compiled.program).splitlines()
    assert rank_texts[3:] == (["commit@0-4"] * 2 if consistency == "bsp" else ["0/1:"] * 2)


def test_units_with_the_same_workers_are_served_together():
    compiled = compile_text("asp(3)", blocks=3)
    assert [
        instruction for _, instruction in compiled.program.instructions() if isinstance(instruction, ApplyPushes)
    ] == [ApplyPushes(((0,), (1,), (2,)), (0, 1, 2))]


def test_asynchrony_promises_no_bound_and_bsp_promises_freshness():
    assert compile_text("asp(2)").cost.staleness is None
    assert compile_text("bsp(2)").cost.staleness == 0
    assert compile_text("data(2) * asp(2)").cost.staleness is None


@pytest.mark.parametrize(("staleness", "bound"), [(0, 2), (1, 6), (3, 14)])
def test_a_bounded_server_promises_how_old_gradients_may_be(staleness, bound):
    compiled = compile_text(f"ssp(3, staleness={staleness})")
    assert compiled.cost.staleness == bound
    assert not compiled.is_synchronous
    assert compile_text("ssp(1)").cost.staleness == 0


def test_a_worker_that_pulls_now_and_then_is_sent_fewer_bytes():
    """In two steps of three the servers send nothing."""
    compiled = compile_text("asp(2, pull_every=3)")
    size = compiled.model.unit_bytes((0,)) + compiled.model.unit_bytes((1,))
    assert [variant.name for variant in compiled.step_variants] == ["local", "sync"]
    assert compiled.sent_bytes() == (size, size, Fraction(2 * size, 3))


def test_a_codec_makes_pushes_smaller_and_replies_not():
    compiled = compile_text("asp(2, compress=twobit)")
    size = compiled.model.unit_bytes((0,)) + compiled.model.unit_bytes((1,))
    assert compiled.sent_bytes() == (size / 16, size / 16, 2 * size)


def test_workers_exchange_with_a_center_now_and_then_and_send_nothing_between():
    compiled = compile_text("easgd(2, alpha=0.5, tau=4)")
    size = compiled.model.unit_bytes((0,)) + compiled.model.unit_bytes((1,))
    assert compiled.sent_bytes() == (size / 4, size / 4, size / 2)
    assert not compiled.is_synchronous


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "server(2, consistency=asp, staleness=1)",
            "staleness is a bound of ssp, 0 or more; give consistency=ssp, staleness=1,",
        ),
        ("ssp(2, staleness=-1)", "staleness=-1 with consistency=ssp: staleness is a bound of ssp, 0 or more"),
        (
            "server(2, compress=powersgd:2)",
            "compress=powersgd:2 of server works only in an all-reduce, but each worker pushes to the",
        ),
        ("server(2, compress=2bit)", "there is no codec '2bit'; the codecs are"),
        ("ssp(2, pull_every=2)", "ssp has no option 'pull_every=2'"),
        (
            "server(2, consistency=ssp, pull_every=2)",
            "pull_every=2 of server must be a number of steps, and 1",
        ),
        ("asp(2, pull_every=0)", "pull_every=0 of server must be a number of steps,"),
        ("asp(2, pull_every=2) * data(2)", "last in a plan, but data(2) comes after it; write it"),
        ("easgd(2, alpha=1, tau=1)", "alpha=1 of easgd is not between 0 and 1; give alpha=0.9 divided by the number"),
        ("easgd(2, servers=0, tau=1)", "easgd(2, servers=0, tau=1) has no exchange with a center;"),
    ],
)
def test_invalid_options_of_a_server_are_refused_with_the_text_to_write(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero(2) * easgd(2, alpha=0.5, tau=1)", "after zero or update=sharded, whose ranks update"),
        ("server(2) * easgd(2, alpha=0.5, tau=1)", "comes after server, whose workers do not"),
        ("tree(2) * easgd(2, alpha=0.5, tau=1)", "after tree, where only the first replica updates;"),
        (
            "tensor(2) * easgd(2, alpha=0.5, tau=1)",
            "after tensor, each shard of which needs its own center; write data(...) instead",
        ),
        ("easgd(2, alpha=0.5, tau=1) * tensor(2)", "after an asynchronous server:"),
        ("easgd(2, alpha=0.5, tau=1) * data(2)", "after an asynchronous server,"),
        ("easgd(2, alpha=0.5, tau=1) * zero(2)", "is in a plan whose weights live on servers;"),
        ("easgd(2, alpha=0.5, tau=1) * easgd(2, alpha=0.5, tau=1)", "comes after server, whose workers do not update"),
    ],
)
def test_a_center_is_refused_where_it_cannot_stand(text, message):
    with pytest.raises(PlanError) as caught:
        compile_text(text)
    assert message in str(caught.value)
