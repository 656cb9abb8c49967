"""What each block keeps is the fastest choice that fits, by the predictions of the simulator."""

import random
import time
from dataclasses import replace
from itertools import product

import pytest

from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, LayerSpec
from counterpoint.plan.plan import Plan
from counterpoint.planner.activations import (
    BlockOption,
    BlockOptions,
    StageOptions,
    choose_activations,
    describe_activations,
    solve_stage,
)
from counterpoint.planner.choice_report import explain_choice, table_row
from counterpoint.planner.choose import rank_and_choose
from counterpoint.planner.memory_suggestions import PlanningProblem
from counterpoint.planner.ranking import build_simulator, predict_plan
from counterpoint.world.cluster import Cluster, Device, Link
from tests.planner.models import layers

BATCH_SIZE = 8


def uneven(num_blocks, seed=0, output_bytes=(2_000, 4_000)):
    """Blocks of two layers, of which the first has most of the activations and the second the output."""
    rng = random.Random(seed)
    model, blocks = layers(num_blocks, width=8), []
    for at, block in enumerate(model.blocks):
        outer = replace(block.layers[0], cost=rng.uniform(1e5, 1e7), output_bytes=rng.choice(output_bytes))
        inner = LayerSpec(f"inner{at}", (), cost=rng.uniform(1e5, 1e7), output_bytes=rng.randrange(1_000, 40_000))
        blocks.append(Block((inner, replace(outer, tp=None)), 2 * at))
    return replace(model, blocks=tuple(blocks))


def limited(bytes_=10**13, disk_bytes_per_s=2e7):
    device = Device(memory_bytes=int(bytes_), disk_bytes_per_s=disk_bytes_per_s)
    return Cluster(device, Link(1e-5, 1e8))


def with_passes(plan, *passes):
    return replace(plan, passes=("overlap", *passes))


def predict(model, plan, cluster):
    return predict_plan(plan, model, cluster, batch_size=BATCH_SIZE)


def limits_between(model, text, m=1, fractions=(0.1, 0.35, 0.7)):
    """A plan, and limits of memory between recomputing everything and keeping everything."""
    plan = with_passes(Plan.parse(text, num_microbatches=m))
    most, least = (
        predict(model, with_passes(plan, *passes), limited()).memory_bytes for passes in ((), ("recompute",))
    )
    return plan, [int(least + fraction * (most - least)) for fraction in fractions]


def choose(model, plan, limit, batch_size=BATCH_SIZE, **options):
    found = choose_activations(plan, build_simulator(model, limited(limit), batch_size), **options)
    assert found is not None
    return found


def fits_nowhere(model, plan, limit):
    return choose_activations(plan, build_simulator(model, limited(limit), BATCH_SIZE)) is None


def try_all(model, plan, limit, *, has_disk=False):
    """Return the seconds of the fastest of all choices that fit."""
    seconds = []
    for modes in product(("keep", "recompute", *(("offload",) if has_disk else ())), repeat=model.num_blocks):
        recomputed = [at for at, mode in enumerate(modes) if mode != "keep"]
        moved = [at for at, mode in enumerate(modes) if mode == "offload"]
        passes = [f"recompute:blocks={'+'.join(map(str, recomputed))}"] * bool(recomputed)
        passes += [f"offload:activations=disk:blocks={'+'.join(map(str, moved))}"] * bool(moved)
        prediction = predict(model, with_passes(plan, *passes), limited(limit))
        seconds += [prediction.step_s] if prediction.fits and recomputed else []
    return min(seconds, default=None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("text", "m"), [("solo", 1), ("data(2)", 2), ("pipeline(2)", 4), ("zero(2, level=3)", 1)])
def test_the_choice_for_few_blocks_is_that_of_brute_force(text, m, seed):
    model = uneven(5, seed)
    plan, limits = limits_between(model, text, m)
    for limit in limits:
        assert choose(model, plan, limit).step_s == pytest.approx(try_all(model, plan, limit), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_inputs_are_on_disk_where_that_is_fastest(seed):
    """Inputs are larger than the activations inside of blocks, so that recomputing everything does not fit."""
    model = uneven(4, seed, output_bytes=(60_000, 90_000))
    plan = with_passes(Plan.parse("solo"))
    offloaded = with_passes(plan, "recompute", "offload:activations=disk")
    for extra in (0, 200_000, 500_000):
        limit = predict(model, offloaded, limited()).memory_bytes + extra
        found, expected = choose(model, plan, limit, allows_disk=True), try_all(model, plan, limit, has_disk=True)
        assert found.step_s == pytest.approx(expected, rel=1e-9)
    assert fits_nowhere(model, plan, limit - 500_000)


@pytest.mark.parametrize("seed", range(6))
def test_the_formula_alone_finds_the_fastest_choice_of_one_rank(seed):
    """With one microbatch in flight it counts time and memory as the simulator does."""
    model = uneven(7, seed)
    plan, limits = limits_between(model, "solo")
    for limit in limits:
        found = choose(model, plan, limit, max_enumerated=0)
        assert found.step_s == pytest.approx(try_all(model, plan, limit), rel=1e-9)


@pytest.mark.parametrize("text", ["solo", "data(2)", "pipeline(4)", "gpipe(2)", "interleaved(2)", "zero(2, level=2)"])
def test_it_fits_and_is_never_slower_than_recomputing_everything(text):
    model = uneven(16, seed=7)
    m = 4 if "(" in text and text[0] in "pgi" else 2
    plan, limits = limits_between(model, text, m, fractions=(0.0, 0.2, 0.5, 0.9))
    everything = predict(model, with_passes(plan, "recompute"), limited()).step_s
    for limit in limits:
        found = choose(model, plan, limit, allows_disk=True)
        assert found.memory_bytes <= limit
        assert found.step_s <= everything * (1 + 1e-9)
        assert predict(model, found.plan, limited(limit)).step_s == found.step_s


def test_what_does_not_fit_at_all_has_no_choice():
    plan, (limit,) = limits_between(uneven(4), "solo", fractions=(-1.0,))
    assert fits_nowhere(uneven(4), plan, limit)
    assert fits_nowhere(layers(1), Plan.parse("asp(2)"), 1)


def test_ranks_of_tensor_parallelism_keep_parts_where_only_those_fit():
    model, plan = layers(6, width=256, cost=1e8), with_passes(Plan.parse("tensor(2)"))
    parts, whole = (
        predict_plan(with_passes(plan, "recompute", *passes), model, limited(), batch_size=4096)
        for passes in (("partition_activations",), ())
    )
    assert parts.memory_bytes < whole.memory_bytes
    found = choose(model, plan, parts.memory_bytes, batch_size=4096)
    assert "partition_activations" in " ".join(found.plan.passes)
    assert found.memory_bytes <= parts.memory_bytes
    assert found.step_s <= parts.step_s * (1 + 1e-9)


def choose_for(model, plan, limit, **options):
    problem = PlanningProblem(model, limited(limit), BATCH_SIZE, **options)
    return rank_and_choose([plan], problem, None)


def test_if_no_plan_fits_that_keeps_everything_the_planner_chooses_what_blocks_keep_and_says_so():
    plan, (limit,) = limits_between(uneven(6), "data(2)", fractions=(0.4,))
    choice = choose_for(uneven(6), plan, limit)
    assert choice.plan.passes[1].startswith("recompute:blocks=")
    prediction = choice.find_prediction(choice.plan)
    assert prediction.memory_bytes <= limit
    assert prediction.communication_s >= 0  # its time is attributed
    assert f"smallest change that fits: {describe_activations(choice.plan)}" in explain_choice(choice)[1]
    assert table_row(prediction, prediction)[0] == f"data(2) + {choice.plan.passes[1]}"


def test_nothing_is_recomputed_where_it_may_not_be():
    plan, (limit,) = limits_between(uneven(6), "data(2)", fractions=(0.4,))
    with pytest.raises(PlanError, match="fits"):
        choose_for(uneven(6), plan, limit, may_recompute=False)


def test_inputs_are_on_disk_only_where_there_is_a_folder_for_them():
    model, plan = uneven(4, output_bytes=(60_000, 90_000)), with_passes(Plan.parse("solo"))
    offloaded = predict(model, with_passes(plan, "recompute", "offload:activations=disk"), limited())
    chosen = choose_for(model, plan, offloaded.memory_bytes, has_offload_folder=True).plan
    assert chosen.passes[-1].startswith("offload:activations=disk")
    with pytest.raises(PlanError, match=r"the smallest change that fits: .* on disk"):
        choose_for(model, plan, offloaded.memory_bytes)


def random_stage(seed, num_blocks=6):
    rng = random.Random(seed)
    blocks = []
    for block in range(num_blocks):
        size = rng.randrange(1, 30)
        modes = [BlockOption("keep", 0.0, size), BlockOption("recompute", rng.uniform(1, 9), rng.randrange(size)),
                 BlockOption("partition", rng.uniform(1, 9), rng.randrange(size))]  # fmt: skip
        blocks.append(BlockOptions(block, tuple(modes), size, rng.randrange(20)))
    return StageOptions((0,), tuple(blocks), rng.randrange(1, 4))


def cost(stage, modes, limit):
    """Return the seconds of modes by the formula as it is written; None if they exceed the limit."""
    chosen = [
        next(one for one in block.options if one.mode == mode) for block, mode in zip(stage.blocks, modes, strict=True)
    ]
    total = sum(one.saved_bytes for one in chosen)
    for at, block in enumerate(stage.blocks):
        before = sum(one.saved_bytes for one in chosen[:at])
        if block.fixed_bytes + before + block.activation_bytes + (stage.num_in_flight - 1) * total > limit:
            return None
    return sum(one.seconds for one in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_knapsack_of_a_stage_is_solved_exactly(seed):
    stage = random_stage(seed)
    for limit in (60, 90, 130):
        costs = [cost(stage, modes, limit) for modes in product(("keep", "recompute", "partition"), repeat=6)]
        found = solve_stage(stage, limit)
        expected = min((one for one in costs if one is not None), default=None)
        assert (cost(stage, found, limit) if found else None) == pytest.approx(expected)


def test_96_blocks_of_64_microbatches_take_seconds():
    model = uneven(96)
    plan = with_passes(Plan.parse("pipeline(4)", num_microbatches=64))
    most, least = (
        predict_plan(with_passes(plan, *one), model, limited(), batch_size=64).memory_bytes
        for one in ((), ("recompute",))
    )
    start = time.process_time()
    assert choose(model, plan, (most + least) / 2, batch_size=64, allows_disk=True).fits
    assert time.process_time() - start < 30


@pytest.mark.parametrize(
    ("passes", "text"),
    [
        (("recompute",), "activation recomputation"),
        (("recompute:blocks=0-2+5",), "recomputation of blocks 0-2+5"),
        (
            ("recompute:blocks=0-2", "partition_activations:blocks=1", "offload:activations=disk:blocks=2"),
            "recomputation of blocks 0-2, with the input of block 1 in parts on the ranks of tensor(n) and the input of "
            "block 2 on disk",
        ),
    ],
)
def test_a_choice_is_described(passes, text):
    assert describe_activations(Plan(passes=passes)) == text
