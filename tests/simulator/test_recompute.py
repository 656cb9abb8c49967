"""Cost of recomputation, one more forward per microbatch, and the memory that it saves."""

import pytest

from counterpoint.compiler.compile import message_size_fn
from counterpoint.simulator.cost_model import unit_costs
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import simulate, simulate_variant
from tests.simulator.programs import compile_text

SAMPLES = 10_000
"""So many that weights are negligible compared with activations."""


@pytest.mark.long(quick=["4-8", "2-2", "4-4"])
@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 4), (4, 8), (8, 32)])
def test_what_is_recomputed_first_is_done_before_its_gradient_arrives(n, m):
    """In ticks, forwards of 1 and backwards of 2: at most the last stage starts to recompute too late."""
    ticks = unit_costs(backward_ticks=2)
    steps = {
        when: simulate(compile_text(f"gpipe({n}, checkpoint={when})", m=m, blocks=n).program, ticks).step_s
        for when in ("never", "except_last", "always")
    }
    assert steps["never"] == 3 * (m + n - 1)
    assert steps["always"] == steps["never"] + m
    assert steps["except_last"] == steps["never"] + m - 1


def test_an_async_pipeline_recomputes_each_microbatch_on_all_stages_but_the_last():
    compiled = compile_text("pipedream(4, recompute=except_last)", m=1, blocks=4)
    trace = simulate_variant(compiled.step_variants[-1], unit_costs(backward_ticks=2))
    assert [trace.busy_s(rank) for rank in range(4)] == [4.0, 4.0, 4.0, 3.0]


def test_of_microbatches_in_flight_only_the_input_of_a_stage_is_kept():
    """Six blocks of one activation each on two stages; the second one keeps what it has received."""
    peaks = {}
    for when in ("never", "always"):
        compiled = compile_text(f"gpipe(2, checkpoint={when})", m=4, blocks=6)
        peaks[when] = peak_memory_bytes(compiled.program, message_size_fn(compiled.model, SAMPLES))
    activation = compiled.model.blocks[0].output_bytes * SAMPLES
    saved = [
        round((before - after) / activation) for before, after in zip(peaks["never"], peaks["always"], strict=True)
    ]
    assert saved == [4 * 3 - 3, 4 * 3 - (3 + 3)]


def test_blocks_that_are_recomputed_one_by_one_keep_their_inputs_all_but_the_first():
    """Saved activations inside a block, of one block instead of all, are not part of a program."""
    plain, again = (compile_text("solo", blocks=6, passes=passes) for passes in ((), ("recompute",)))
    before, after = (
        peak_memory_bytes(compiled.program, message_size_fn(compiled.model, SAMPLES))[0] for compiled in (plain, again)
    )
    assert round((before - after) / (plain.model.blocks[0].output_bytes * SAMPLES)) == 1
