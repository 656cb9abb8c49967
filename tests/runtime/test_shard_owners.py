"""Every element of every parameter has one owner, which counts it in norms and saves it."""

import pytest
import torch

from counterpoint.runtime.params.flat_layout import WHOLE
from counterpoint.runtime.rank_builder import find_shard_owners, loss_scopes, owned_units, take_slice
from counterpoint.runtime.state_dict import gather_weights, load_weights
from tests.runtime.local_ranks import build_local_ranks, chain, make_batch

PLANS = [
    "solo", "data(3)", "zero(2, level=1)", "zero(3, level=2)", "zero(4, level=3)", "pipeline(2)", "tensor(2)",
    "pipeline(2, replicas=(2,1))", "pipeline(2) * data(2)", "pipeline(2) * zero(2, level=1)", "tensor(2) * data(2)",
    "tensor(2) * pipeline(2)", "zero(2, level=3) * data(2)", "server(2)", "server(2, servers=2)", "asp(2)",
    "data(2) * server(2)", "ssp(2)", "bsp(2, compress=int8)",
]  # fmt: skip


def build(plan):
    return build_local_ranks(plan, num_microbatches=2)


@pytest.mark.parametrize("plan", PLANS)
def test_every_element_has_one_owner(plan):
    with build(plan) as local_ranks:
        shard_map = local_ranks.shard_map()
        for unit in local_ranks.run_spec.model_spec.units:
            owners = [owner for owner in shard_map.shard_owners() if owner.unit == unit]
            for index in {owner.tp_rank for owner in owners}:
                for layout in shard_map.layouts(unit):
                    ranges = sorted(layout.element_range(h.span) for h in owners if h.tp_rank == index)
                    covered = [element for low, high in ranges for element in range(low, high)]
                    assert covered == list(range(layout.num_elements))


@pytest.mark.parametrize("plan", PLANS)
def test_the_owner_of_a_shard_also_updates_it(plan):
    with build(plan) as local_ranks:
        for owner in find_shard_owners(local_ranks.run_spec):
            role = local_ranks.ranks[owner.rank].interpreter.store.units[owner.unit].role
            assert role.update_shard == owner.span
        owned = [unit for rank in local_ranks.ranks for unit in owned_units(local_ranks.run_spec, rank)]
        assert len(owned) == len(find_shard_owners(local_ranks.run_spec))


@pytest.mark.long(
    quick=["pipeline(2) * zero(2, level=1)", "bsp(2, compress=int8)", "data(3)", "server(2, servers=2)", "solo"]
)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_gathered_from_the_ranks_are_the_models(plan):
    with build(plan) as local_ranks:
        expected = {name: param.detach() for name, param in chain(4).named_parameters()}
        for full in local_ranks.world.run(
            lambda fabric: gather_weights(local_ranks.shard_map(), local_ranks.ranks[fabric.rank], fabric)
        ):
            assert full.keys() == expected.keys()
            assert all(torch.equal(full[name], value) for name, value in expected.items())


@pytest.mark.parametrize("plan", PLANS)
def test_weights_loaded_into_the_ranks_are_gathered_again(plan):
    with build(plan) as local_ranks:
        other = {name: torch.randn_like(param) for name, param in chain(4).named_parameters()}

        def work(fabric):
            load_weights(local_ranks.shard_map(), local_ranks.ranks[fabric.rank], other.__getitem__)
            return gather_weights(local_ranks.shard_map(), local_ranks.ranks[fabric.rank], fabric)

        for full in local_ranks.world.run(work):
            assert all(torch.equal(full[name], value) for name, value in other.items())


@pytest.mark.long(quick=["zero(2, level=1)", "zero(3, level=2)", "pipeline(2)", "pipeline(2) * data(2)"])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan not in {"asp(2)", "ssp(2)"}])
def test_replicas_have_equal_weights_after_a_step(plan):
    """Ranks with a whole parameter, or with the same slice of it, have the same bits; a server's workers as well."""
    with build(plan) as local_ranks:
        local_ranks.step(0, make_batch(local_ranks.global_num_microbatches))
        copies: dict[tuple[str, int], list[torch.Tensor]] = {}
        for number, rank in local_ranks.ranks.items():
            index = local_ranks.run_spec.program.rank_programs[number].tp_rank
            full = [
                unit_params
                for unit_params in rank.interpreter.store.units.values()
                if unit_params.role.local_shard == WHOLE
            ]
            for name, param in ((name, param) for unit_params in full for name, param in unit_params.params.items()):
                copies.setdefault((name, index), []).append(param.detach().clone())
    assert all(torch.equal(values[0], value) for values in copies.values() for value in values)


@pytest.mark.parametrize(
    ("plan", "scopes"),
    [
        ("data(2)", [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]),
        ("pipeline(2)", [[[0, 1]], [[0, 1]]]),
        ("asp(2)", [[[0, 1]], [[2, 3]], []]),
        ("data(2) * easgd(2, alpha=0.5, tau=1)", [[[0, 1, 2, 3]]] * 2 + [[[4, 5, 6, 7]]] * 2 + [[]]),
        ("server(2)", [[[0, 1, 2, 3]]] * 3),
        ("pipeline(2, schedule=pipedream, replicas=(2,1))", [[[0, 1]], [[0, 1]], [[0], [1]]]),
    ],
)
def test_a_loss_is_a_mean_over_the_samples_of_the_commit_group(plan, scopes):
    with build(plan) as local_ranks:
        assert [loss_scopes(local_ranks.run_spec.program, rank) for rank in range(len(scopes))] == scopes


def test_a_slice_depends_on_the_position_only():
    whole = torch.arange(12).view(4, 3)
    assert take_slice(whole, (0, 2), (1, 2)).tolist() == [[6, 7, 8], [9, 10, 11]]
    assert take_slice(whole, (1, 3), (0, 3)).tolist() == [[0], [3], [6], [9]]
    assert take_slice(whole, None, (1, 2)) is whole
