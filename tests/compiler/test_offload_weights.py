"""Shards of weights are fetched before each gather and update, and offloaded after the update, and nothing else changes."""

from fractions import Fraction

import pytest

from counterpoint.compiler.compile import storage_size_fn
from counterpoint.compiler.offload import offload
from counterpoint.errors import PlanError, ProgramError
from counterpoint.model.spec import linear_chain
from counterpoint.program.instruction import Fetch, weight
from counterpoint.program.text import format_program, parse_program
from counterpoint.program.verify.verifier import verify
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.simulator.memory import memory_timeline
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.offload import Offloading
from counterpoint.world.cluster import Cluster, Device
from tests.program.verify.random_plans import compile_text

PASS = "offload:params=disk"
ZERO3 = "zero(2, level=3)"
BLOCK_BYTES = 4 * 256 * 256
PLANS = [
    ZERO3,
    "zero(2, level=3) * data(2)",
    "data(2) * zero(2, level=3)",
    "pipeline(2) * zero(2, level=3)",
    "pipeline(2, schedule=zero_bubble) * zero(2, level=3)",
    "tensor(2) * zero(2, level=3)",
    "zero(2, level=3, reshard_after_forward=off)",
]
PASSES = {"blocking": (), "prefetch": ("overlap", "prefetch"), "recompute": ("recompute", "prefetch")}


def words_of(text, passes=(), **options):
    """Return the words of rank 0."""
    program = compile_text(text, passes=(*passes, PASS), **options).program
    return format_program(program).splitlines()[0].split(" ")


def test_each_gather_has_the_read_of_the_next_one_after_it():
    assert " ".join(words_of(ZERO3, blocks=3)).startswith(
        "fetch(weight0)<disk all_gather(weight0)@0,1 fetch(weight1)<disk F0.0 free(weight0) all_gather(weight1)@0,1 "
        "fetch(weight2)<disk F1.0 free(weight1) all_gather(weight2)@0,1 F2.0 free(weight2) fetch(weight2)<disk "
        "all_gather(weight2)@0,1 fetch(weight1)<disk B2.0 "
    )


def test_during_an_update_the_next_shard_is_read_and_the_one_before_written():
    assert " ".join(words_of(ZERO3, blocks=3)).endswith(
        "commit@0,1 fetch(weight0)<disk fetch(weight1)<disk U0 fetch(weight2)<disk U1 offload(weight0)>disk U2 "
        "offload(weight1)>disk offload(weight2)>disk"
    )


def test_state_is_fetched_for_one_update_at_a_time():
    text = " ".join(words_of(ZERO3, passes=("offload:state=disk",), blocks=3))
    assert text.endswith(
        "fetch(weight0)<disk fetch(weight1)<disk fetch(state0)<disk U0 offload(state0)>disk fetch(weight2)<disk "
        "fetch(state1)<disk U1 offload(state1)>disk offload(weight0)>disk fetch(state2)<disk U2 offload(state2)>disk "
        "offload(weight1)>disk offload(weight2)>disk"
    )


def test_weights_that_stay_whole_are_not_offloaded():
    words = words_of("zero(2, level=3, persistence_threshold=256)", blocks=2)
    assert [word for word in words if "fetch" in word]
    program = parse_program("all_gather(weight0)@0 F0.0 B0.0 free(weight0) commit@0 U0 U1 all_gather(weight1)@0 U2")
    moved = format_program(offload(program, Offloading(params="disk"), linear_chain(3)))
    assert moved == (
        "fetch(weight0)<disk all_gather(weight0)@0 F0.0 B0.0 free(weight0) commit@0 fetch(weight0)<disk U0 U1 "
        "offload(weight0)>disk all_gather(weight1)@0 U2"
    )


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("text", PLANS)
def test_the_plan_is_a_pure_rewrite_of_the_one_without(text, passes):
    plain, moved = (compile_text(text, m=2, blocks=4, passes=(*PASSES[passes], *more)) for more in ((), (PASS,)))
    assert moved.sent_bytes() == plain.sent_bytes()
    rest = [
        " ".join(word for word in line.split(" ") if not word.startswith(("fetch(", "offload(")))
        for line in format_program(moved.program).splitlines()
    ]
    assert rest == format_program(plain.program).splitlines()
    assert parse_program(format_program(moved.program)) == moved.program


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("solo", "under solo weights are whole; use zero"),
        ("data(2)", "weights are whole; use zero"),
        ("zero(2, level=2)", r"under zero\(2, level=2\) weights are whole; use zero\(n, level=3\)"),
        ("zero(2, level=3, persistence_threshold=100000)", "a persistence_threshold below the sizes of its"),
        ("pipedream(2)", r"schedule=pipedream\) weights are whole"),
    ],
)
def test_weights_that_no_rank_gathers_for_each_use_are_refused(text, message):
    with pytest.raises(PlanError, match=message):
        compile_text(text, passes=(PASS,))


def test_the_pass_is_asked_for_once():
    with pytest.raises(PlanError, match="both say what is offloaded"):
        compile_text(ZERO3, passes=(PASS, PASS))
    with pytest.raises(PlanError, match="did you mean offload:params=disk"):
        compile_text(ZERO3, passes=("offload:param=disk",))


STEP = (
    "fetch(weight0)<disk all_gather(weight0)@0,1 F0.{0} B0.{0} reduce_scatter(grad0)@0,1 free(grad0) free(weight0) "
    "commit@0,1 fetch(weight0)<disk U0 offload(weight0)>disk"
)
MISSING = "weight0 is offloaded, and has not been fetched"


def verify_step(text):
    """Verify a step of two ranks."""
    return verify(parse_program("\n".join(text.format(rank) for rank in range(2))))


@pytest.mark.parametrize(
    ("words", "instead", "fact"),
    [
        ("fetch(weight0)<disk all", "all", MISSING),
        ("fetch(weight0)<disk U0", "U0", MISSING),
        ("fetch(weight0)<disk U0", "fetch(weight0)<disk fetch(weight0)<disk U0", "these weights are in memory already"),
        ("F0.", "fetch(weight0)<disk F0.", "these weights are in memory already"),
        ("fetch(weight0)<disk U0", "fetch(weight0)<host U0", "these weights are in another place"),
        ("U0 offload(weight0)>disk", "U0 offload(weight0)>host", "these weights were fetched from another place"),
        (
            "U0 offload(weight0)>disk",
            "U0",
            "these weights are neither gathered nor offloaded again, and stay in memory",
        ),
        ("disk U0", "disk offload(weight0)>disk U0", MISSING),
        ("U0 offload(weight0)>disk", "U0 all_gather(weight0)@0,1 free(weight0)", "and have not been offloaded since"),
    ],
)
def test_weights_that_are_used_where_they_are_not_break_rule_seven(words, instead, fact):
    with pytest.raises(ProgramError, match=fact) as caught:
        verify_step(STEP.replace(words, instead))
    assert caught.value.rule == 7


def test_a_gather_that_is_started_needs_its_weights_then():
    text = STEP.replace("all_gather(weight0)@0,1", "all_gather_start(weight0)@0,1 all_gather_wait(weight0)@0,1")
    assert verify_step(text).updates
    with pytest.raises(ProgramError, match=rf"all_gather_start.*: {MISSING}"):
        verify_step(text.replace("fetch(weight0)<disk all", "all"))


def test_weights_that_are_fetched_for_each_use_break_no_rule():
    assert verify_step(STEP).updates


def memory(passes, *, blocks=8):
    """Return the words of rank 0, and the bytes before the first and during each of them."""
    compiled = compile_text(ZERO3, blocks=blocks, passes=passes)
    timeline = memory_timeline(compiled.program, storage_size_fn(compiled.model, 1))[0]
    return format_program(compiled.program).splitlines()[0].split(" "), timeline


def test_memory_has_the_shards_that_are_fetched_and_those_of_an_update():
    (words, moved), (plain_words, plain) = memory((PASS,)), memory(())
    shard = BLOCK_BYTES // 2
    assert plain[0] - moved[0] == 8 * shard
    held = {word: plain[plain_words.index(word) + 1] - moved[words.index(word) + 1] for word in ("F0.0", "U0", "U3")}
    assert held == {"F0.0": 7 * shard, "U0": 5 * shard, "U3": 4 * shard}
    assert moved[-1] == moved[0]


def test_the_time_of_a_step_has_that_of_the_disk():
    compiled = compile_text(ZERO3, blocks=2, passes=(PASS,))
    cluster = Cluster(Device(disk_bytes_per_s=1e6))
    costs = analytic_costs(compiled.model, cluster, storage_size_fn(compiled.model, 1))
    own = BLOCK_BYTES / 2
    assert costs.offload_s(Fetch(weight((0,)), "disk"), Fraction(1, 2)) == pytest.approx(own / 1e6)
    events = [one for one in simulate(compiled.program, costs, cluster).events if one.rank == 0]
    moves = [one for one in events if one.lane == "link" and one.text.startswith(("fetch(weight", "offload(weight"))]
    assert [one.seconds for one in moves] == pytest.approx([own / 1e6] * 8)  # three reads and a write of each
