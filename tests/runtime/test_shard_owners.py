"""Who answers for what: every element of every parameter is counted in norms, and saved, exactly once."""

import pytest
import torch

from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.rank_builder import find_shard_owners, loss_scopes, owned_units, take_slice
from counterpoint.runtime.state_dict import gather_weights, load_weights
from tests.runtime.local_ranks import build_team, chain, make_batch

PLANS = [
    "solo", "data(3)", "zero(2, level=1)", "zero(3, level=2)", "zero(4, level=3)", "pipeline(2)", "tensor(2)",
    "pipeline(2, replicas=(2,1))", "pipeline(2) * data(2)", "pipeline(2) * zero(2, level=1)", "tensor(2) * data(2)",
    "tensor(2) * pipeline(2)", "zero(2, level=3) * data(2)", "server(2)", "server(2, servers=2)", "asp(2)",
    "data(2) * server(2)", "ssp(2)", "bsp(2, compress=int8)",
]  # fmt: skip


def built(plan):
    return build_team(plan, num_microbatches=2)


@pytest.mark.parametrize("plan", PLANS)
def test_every_element_has_one_rank_that_answers_for_it(plan):
    with built(plan) as one:
        book = one.shard_map()
        for unit in one.run_spec.model_spec.units:
            mine = [holding for holding in book.shard_owners() if holding.unit == unit]
            for index in {holding.slice_index for holding in mine}:
                for layout in book.layouts(unit):
                    ranges = sorted(layout.element_range(h.span) for h in mine if h.slice_index == index)
                    covered = [element for low, high in ranges for element in range(low, high)]
                    assert covered == list(range(layout.num_elements))


@pytest.mark.parametrize("plan", PLANS)
def test_who_answers_for_a_part_also_updates_it(plan):
    with built(plan) as one:
        for holding in find_shard_owners(one.run_spec):
            role = one.ranks[holding.rank].interpreter.store.units[holding.unit].role
            assert role.update_shard == holding.span
        answered = [unit for rank in one.ranks for unit in owned_units(one.run_spec, rank)]
        assert len(answered) == len(find_shard_owners(one.run_spec))


@pytest.mark.parametrize("plan", PLANS)
def test_weights_gathered_from_the_ranks_are_the_models(plan):
    with built(plan) as one:
        expected = {name: param.detach() for name, param in chain(4).named_parameters()}
        for full in one.world.run(lambda fabric: gather_weights(one.shard_map(), one.ranks[fabric.rank], fabric)):
            assert full.keys() == expected.keys()
            assert all(torch.equal(full[name], value) for name, value in expected.items())


@pytest.mark.parametrize("plan", PLANS)
def test_weights_written_to_the_ranks_are_gathered_again(plan):
    with built(plan) as one:
        other = {name: torch.randn_like(param) for name, param in chain(4).named_parameters()}

        def work(fabric):
            load_weights(one.shard_map(), one.ranks[fabric.rank], other.__getitem__)
            return gather_weights(one.shard_map(), one.ranks[fabric.rank], fabric)

        for full in one.world.run(work):
            assert all(torch.equal(full[name], value) for name, value in other.items())


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan not in {"asp(2)", "ssp(2)"}])
def test_replicas_have_equal_weights_after_a_step(plan):
    """Whoever holds a parameter in full, or the same slice of it, holds the same bits; a server's workers as well."""
    with built(plan) as one:
        one.step(0, make_batch(one.global_num_microbatches))
        held: dict[tuple[str, int], list[torch.Tensor]] = {}
        for at, rank in one.ranks.items():
            index = one.run_spec.program.rank_programs[at].tp_rank
            full = [store for store in rank.interpreter.store.units.values() if store.role.local_shard == WHOLE]
            for name, param in ((name, param) for store in full for name, param in store.params.items()):
                held.setdefault((name, index), []).append(param.detach().clone())
    assert all(torch.equal(values[0], value) for values in held.values() for value in values)


@pytest.mark.parametrize(
    ("plan", "domains"),
    [
        ("data(2)", [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]),
        ("pipeline(2)", [[[0, 1]], [[0, 1]]]),
        ("asp(2)", [[[0, 1]], [[2, 3]], []]),
        ("data(2) * easgd(2, alpha=0.5, tau=1)", [[[0, 1, 2, 3]]] * 2 + [[[4, 5, 6, 7]]] * 2 + [[]]),
        ("server(2)", [[[0, 1, 2, 3]]] * 3),
        ("pipeline(2, schedule=pipedream, replicas=(2,1))", [[[0, 1]], [[0, 1]], [[0], [1]]]),
    ],
)
def test_a_loss_is_a_mean_over_the_samples_of_all_who_commit_together(plan, domains):
    with built(plan) as one:
        assert [loss_scopes(one.run_spec.program, rank) for rank in range(len(domains))] == domains


def test_a_slice_is_the_same_whoever_takes_it():
    whole = torch.arange(12).view(4, 3)
    assert take_slice(whole, (0, 2), (1, 2)).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert take_slice(whole, (1, 3), (0, 3)).tolist() == [[0], [3], [6], [9]]
    assert take_slice(whole, None, (1, 2)) is whole
