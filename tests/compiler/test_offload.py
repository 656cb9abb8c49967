"""States are fetched before the updates that need them and offloaded again, without changing anything else."""

from fractions import Fraction

import pytest

from counterpoint.compiler.compile import storage_size_fn
from counterpoint.compiler.offload import offload
from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.instruction import Fetch, Offload, Update, state
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.memory import OFFLOAD_BUFFER_BYTES, memory_timeline
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.offload import Offloading
from counterpoint.world.cluster import Cluster, Device
from tests.program.verify.random_plans import compile_text

PASS = "offload:state=disk"
STEP = "F0.0 B0.0 commit@0 {} U0 {}"


def offloaded(text):
    return format_program(offload(parse_program(text), Offloading("disk"), linear_chain(3)))


def test_each_run_of_updates_has_its_states_around_it():
    assert offloaded("F0.0 B0.0 commit@0 U0 U1 all_gather(weight0)@0 U2") == (
        "F0.0 B0.0 commit@0 fetch(state0)<disk fetch(state1)<disk U0 U1 offload(state0)>disk offload(state1)>disk "
        "all_gather(weight0)@0 fetch(state2)<disk U2 offload(state2)>disk"
    )


@pytest.mark.parametrize(
    "text", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2) * zero(2)", "tensor(2)", "tree(2)"]
)
def test_a_plan_without_servers_sends_what_it_sent(text):
    plain, moved = (compile_text(text, m=2, passes=passes) for passes in ((), (PASS,)))
    assert moved.sent_bytes() == plain.sent_bytes()
    assert parse_program(format_program(moved.program)) == moved.program


@pytest.mark.parametrize("text", ["asp(2)", "ssp(2)", "data(2) * asp(2)"])
def test_servers_keep_their_state_in_memory(text):
    with pytest.raises(PlanError, match="servers update whenever pushes arrive"):
        compile_text(text, passes=(PASS,))


@pytest.mark.parametrize("name", ["offload", "offload:", "offload:state", "offload:state=tape", "offload:weight=disk"])
def test_a_pass_that_does_not_say_what_and_where_to_is_refused(name):
    with pytest.raises(
        PlanError,
        match=r"does not say what is offloaded and where to.*; (did you mean|write) offload:state=(disk|host)",
    ):
        Plan(passes=(name,))


def test_a_plan_has_one_place_for_its_state():
    with pytest.raises(PlanError, match=r"the passes offload:state=disk and offload:state=disk both say"):
        Plan(passes=(PASS, PASS))


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        ("", "offload(state0)>disk", "the state of unit 0 is offloaded, and has not been fetched"),
        ("fetch(state0)<disk fetch(state0)<disk", "offload(state0)>disk", "this state is fetched already"),
        ("fetch(state0)<disk", "offload(state0)>disk offload(state0)>disk", "this state has not been fetched"),
        ("fetch(state0)<disk", "offload(state0)>host", "this state was fetched from another place"),
        ("fetch(state0)<disk", "", "this state is not offloaded again, and stays in memory"),
    ],
)
def test_states_that_are_used_where_they_are_not_break_rule_seven(before, after, fact):
    with pytest.raises(ProgramError, match=fact) as caught:
        verify(parse_program(STEP.format(before, after)))
    assert caught.value.rule == 7


def test_a_state_that_is_fetched_for_its_update_breaks_no_rule():
    assert verify(parse_program(STEP.format("fetch(state0)<disk", "offload(state0)>disk"))).updates


def memory(text, passes, blocks):
    """Return the bytes of rank 0 before its step, and while it updates."""
    compiled = compile_text(text, blocks=blocks, passes=passes)
    (before, *during), *_ = memory_timeline(compiled.program, storage_size_fn(compiled.model, 1))
    places = [at for at, one in enumerate(compiled.program.rank_programs[0].body) if isinstance(one, Update)]
    return before, during[places[0]]


@pytest.mark.parametrize(("text", "fraction"), [("solo", 1), ("zero(2)", 2)])
@pytest.mark.parametrize("blocks", [4, 1024])
def test_offloaded_states_take_no_memory_but_that_of_their_buffers(text, fraction, blocks):
    states = 2 * 4 * 256 * 256 * blocks // fraction
    (before, update), (before_moved, update_moved) = (memory(text, passes, blocks) for passes in ((), (PASS,)))
    assert before - before_moved == states
    assert update - update_moved == max(states - OFFLOAD_BUFFER_BYTES, 0)


def test_the_time_of_a_step_has_that_of_the_disk():
    compiled = compile_text("zero(2)", blocks=1, passes=(PASS,))
    cluster = Cluster(Device(disk_bytes_per_s=1e6))
    costs = analytic_costs(compiled.model, cluster, storage_size_fn(compiled.model, 1))
    own = 2 * 4 * 256 * 256 / 2
    assert costs.offload_s(Fetch(state((0,)), "disk"), Fraction(1, 2)) == pytest.approx(own / 1e6)
    events = [one for one in simulate(compiled.program, costs, cluster).events if "state0" in one.text]
    assert [one.seconds for one in events if one.rank == 0] == pytest.approx([own / 1e6] * 2)


def test_state_in_host_memory_takes_the_time_of_weights_and_gradients_that_travel():
    compiled = compile_text("zero(2)", blocks=1, passes=("offload:state=host",))
    costs = analytic_costs(compiled.model, Cluster(Device(host_bytes_per_s=1e6)), storage_size_fn(compiled.model, 1))
    weights, place = 4 * 256 * 256 / 2, state((0,))
    assert costs.offload_s(Fetch(place, "host"), Fraction(1, 2)) == pytest.approx(2 * weights / 1e6)
    assert costs.offload_s(Offload(place, "host"), Fraction(1, 2)) == pytest.approx(weights / 1e6)


def test_state_in_host_memory_takes_none_of_the_devices():
    before, update = memory("solo", (), 4)
    states = 2 * 4 * 256 * 256 * 4
    assert memory("solo", ("offload:state=host",), 4) == (before - states, update - states)


def test_the_plan_is_a_pure_rewrite_of_the_one_without():
    moved = compile_text("zero(2)", passes=(PASS,)).program
    plain = " ".join(word for word in format_program(moved).split(" ") if "(state" not in word)
    assert plain == format_program(compile_text("zero(2)").program)


ACTIVATIONS = ("recompute", "offload:activations=disk")


def test_inputs_are_read_during_the_computation_before_their_recomputation():
    assert format_program(compile_text("solo", blocks=4, passes=ACTIVATIONS).program) == (
        "F0.0 F1.0 offload(x1.0)>disk F2.0 offload(x2.0)>disk F3.0 fetch(x2.0)<disk B3.0 R2.0 fetch(x1.0)<disk B2.0 "
        "R1.0 B1.0 R0.0 B0.0 commit@0 U0 U1 U2 U3"
    )


def test_forwards_that_are_recomputed_together_stay_one_call():
    compiled = compile_text("pipeline(2, recompute=always)", m=2, blocks=4, passes=ACTIVATIONS[1:])
    assert "x2.0<0 F2.0 F3.0 offload(x2.0)>disk fetch(x2.0)<disk R2.0 R3.0 B3.0" in format_program(compiled.program)
    assert parse_program(format_program(compiled.program)) == compiled.program


def test_state_and_activations_go_to_disk_together():
    text = format_program(compile_text("solo", blocks=3, passes=(*ACTIVATIONS, PASS)).program)
    assert "offload(x1.0)>disk" in text
    assert "fetch(state0)<disk fetch(state1)<disk fetch(state2)<disk U0 U1 U2" in text


def test_memory_has_the_input_that_is_written_and_those_that_are_read():
    plain, moved = (compile_text("solo", blocks=8, passes=passes) for passes in (ACTIVATIONS[:1], ACTIVATIONS))
    timelines = [memory_timeline(one.program, storage_size_fn(one.model, 1000))[0] for one in (plain, moved)]
    size = plain.model.find_edge((0, 1)).num_bytes * 1000
    words = [format_program(one.program).split() for one in (plain, moved)]
    held = [line[text.index("F7.0") + 1] for line, text in zip(timelines, words, strict=True)]
    assert held[0] - held[1] == 5 * size  # of six inputs, but for the last one, which is being written
    read = timelines[1][words[1].index("fetch(x5.0)<disk") + 1] - timelines[1][words[1].index("R6.0") + 1]
    assert read == size


def test_the_time_of_inputs_is_their_bytes_by_the_bandwidth_of_the_disk():
    plain, moved = (compile_text("solo", blocks=4, passes=passes) for passes in (ACTIVATIONS[:1], ACTIVATIONS))
    cluster = Cluster(Device(disk_bytes_per_s=1e6))
    step_s = [
        simulate(one.program, analytic_costs(one.model, cluster, storage_size_fn(one.model, 2))).step_s
        for one in (plain, moved)
    ]
    assert step_s[1] - step_s[0] == pytest.approx(4 * plain.model.find_edge((0, 1)).num_bytes * 2 / 1e6)


@pytest.mark.parametrize(
    ("text", "passes", "message"),
    [
        (
            "solo",
            ACTIVATIONS[1:],
            "but nothing is recomputed; add the pass recompute, or give the pipeline recompute=a",
        ),
        ("solo", ("recompute", "offload:activation=disk"), "did you mean offload:activations=disk"),
        ("solo", ("recompute", "offload:activations=dsk"), "did you mean offload:activations=disk"),
        ("solo", (*ACTIVATIONS, ACTIVATIONS[1]), "both say what is offloaded"),
        ("tensor(2)", (*ACTIVATIONS, "partition_activations"), "both say where the inputs are that blocks"),
        (
            "tensor(2)",
            ("recompute", "partition_activations:blocks=1-2", "offload:activations=disk:blocks=2"),
            "both say where the input of block 2 is",
        ),
        ("solo", ("recompute", "offload:activations=disk:blocks=x"), "does not say which blocks; write offload:activ"),
        ("pipedream(2, recompute=always)", ACTIVATIONS[1:], "offload:activations is not available; drop it"),
    ],
)
def test_activations_that_cannot_be_offloaded_are_refused(text, passes, message):
    with pytest.raises(PlanError, match=message):
        compile_text(text, blocks=4, passes=passes)


@pytest.mark.parametrize(
    ("words", "instead", "message"),
    [
        ("fetch(x1.0)<disk", "", "x1.0 is not live here"),
        ("fetch(x1.0)<disk", "fetch(x1.0)<host", "the copy in host memory of x1.0 is not live here"),
        ("offload(x1.0)>disk", "", "the copy on disk of x1.0 is not live here"),
        ("F1.0 offload(x1.0)>disk", "offload(x1.0)>disk F1.0", "x1.0 is not live here"),
    ],
)
def test_an_input_that_is_not_in_memory_is_found(words, instead, message):
    text = format_program(compile_text("solo", blocks=3, passes=ACTIVATIONS).program)
    with pytest.raises(ProgramError, match=message) as caught:
        verify(parse_program(text.replace(words, instead).replace("  ", " ")))
    assert caught.value.rule == 4
