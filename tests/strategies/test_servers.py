"""Who keeps which unit, and who talks to whom."""

import pytest
from hypothesis import given, strategies as st

from counterpoint.program.instruction import Serve
from counterpoint.program.text import format_program
from counterpoint.server.placement import assign
from tests.laws.compositions import compiled

sizes = st.dictionaries(st.integers(0, 20).map(lambda block: (block,)), st.integers(0, 99), max_size=9)


@given(sizes, st.integers(1, 4))
def test_no_server_has_more_than_the_largest_unit_above_another(found, num_servers):
    owner = assign(found, num_servers)
    load = [sum(found[unit] for unit in owner if owner[unit] == server) for server in range(num_servers)]
    assert owner.keys() == found.keys()
    assert max(load) - min(load) <= max(found.values(), default=0)


def test_equal_units_go_round_the_servers():
    assert assign({(0,): 5, (1,): 5, (2,): 5}, 2) == {(0,): 0, (1,): 1, (2,): 0}


@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_a_server_without_units_is_legal_and_idle(consistency):
    made = compiled(f"{consistency}(2, servers=3)", blocks=1)
    rows = format_program(made.program).splitlines()
    assert rows[3:] == (["commit@0-4"] * 2 if consistency == "bsp" else ["0/1:"] * 2)


def test_units_with_the_same_workers_are_served_together():
    made = compiled("asp(3)", blocks=3)
    assert [word for _, word in made.program.words() if isinstance(word, Serve)] == [
        Serve(((0,), (1,), (2,)), (0, 1, 2))
    ]


def test_asynchrony_promises_no_bound_and_bsp_promises_freshness():
    assert compiled("asp(2)").forecast.staleness is None
    assert compiled("bsp(2)").forecast.staleness == 0
    assert compiled("data(2) * asp(2)").forecast.staleness is None
