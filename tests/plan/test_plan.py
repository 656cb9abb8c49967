"""Plans as text, as YAML and as values, and what they say when they cannot be read."""

import pytest

from counterpoint.errors import PlanError
from counterpoint.plan.plan import Plan
from counterpoint.plan.registry import STRATEGIES, find_strategy
from counterpoint.strategies.data import Data
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.zero import Zero


def refusal(text, **given):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "strategies"),
    [
        ("solo", ()),
        ("data(2)", (Data(2),)),
        (" data ( 2 ) ", (Data(2),)),
        ("zero(2)", (Zero(2, 1),)),
        ("zero(4, level=3)", (Zero(4, 3),)),
        ("zero2(2)", (Zero(2, 2),)),
        ("gpipe(4)", (Pipeline(4, "gpipe"),)),
        ("pipeline(4)*data(2)", (Pipeline(4), Data(2))),
        ("pipeline(2, replicas=(2,1), balance=(1, 3))", (Pipeline(2, replicas=(2, 1), balance=(1, 3)),)),
        ("tensor(2, dims=heads+experts)", (Tensor(2, ("heads", "experts")),)),
        ("server(2, servers=3)", (Server(2, 3, "bsp"),)),
        ("solo * data(2) * asp(4)", (Data(2), Server(4, 1, "asp"))),
    ],
)
def test_a_plan_is_read_as_its_strategies_from_left_to_right(text, strategies):
    assert Plan.parse(text).strategies == strategies


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_name_of_the_table_makes_a_plan_that_reads_back_as_itself(name):
    plan = Plan.parse(find_strategy(name).example or f"{name}(2)")
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize("name", [name for name, named in STRATEGIES.items() if isinstance(named.doc_source, type)])
def test_a_name_of_a_strategy_makes_that_one(name):
    assert type(find_strategy(name).build_strategies(2, {})[0]) is find_strategy(name).doc_source


@pytest.mark.parametrize(
    "text",
    [
        "solo",
        "pipeline(3, schedule=gpipe, replicas=(2,1,1), balance=(1,2,1)) * zero(2, level=2)",
        "tensor(2, dims=heads) * data(2)",
        "data(2) * server(2, servers=2, consistency=asp)",
        "data(4, bucket=64MiB, first_bucket=0, cycle=2.5, tune=off)",
    ],
)
def test_a_plan_writes_what_it_reads(text):
    assert str(Plan.parse(text)) == text


def test_a_plan_file_holds_the_plan_and_the_ranks_it_needs():
    plan = Plan(Plan.parse("gpipe(2) * data(2)").strategies, 4, ("overlap",))
    assert plan.to_yaml() == (
        "plan:\n  strategy: pipeline(2, schedule=gpipe) * data(2)\n  num_microbatches: 4\n  passes:\n  - overlap\n"
        "num_ranks: 4\n"
    )
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_plan_file_needs_no_more_than_a_strategy():
    assert Plan.from_yaml("plan: {strategy: data(2)}") == Plan((Data(2),), 1, ())
    assert Plan.from_yaml('plan: {strategy: "gpipe(2, chunks=4)"}').num_microbatches == 4


@pytest.mark.parametrize(
    ("text", "error_text"),
    [
        ("plan: [", "the plan file is not YAML: while parsing"),
        ("", "a plan file has 'plan:' with 'strategy:',"),
        ("plan: {num_microbatches: 2}", "a plan file has 'plan:' with 'strategy:',"),
        ("plan: {strategy: solo, micros: 2}", "a plan has no key 'micros'; its keys are strategy,"),
        ("plan: {strategy: solo, num_microbatches: two}", "num_microbatches must be a whole number"),
        ("plan: {strategy: solo, num_microbatches: 1.5}", "num_microbatches must be a whole number"),
        ("plan: {strategy: solo, passes: overlap}", "passes a list, not 1 and 'overlap'"),
        (
            "plan: {strategy: solo, passes: [fast]}",
            "there is no pass 'fast'; the passes are overlap, recompute, partition_activations, gather_outputs",
        ),
        ("plan: {strategy: datta(2)}", "there is no strategy 'datta'; did you mean data?"),
    ],
)
def test_a_plan_file_that_cannot_be_read_says_why(text, error_text):
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(text)
    assert error_text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_ranks", "read"),
    [
        ("data", 4, "data(4)"),
        ("data", 1, "solo"),
        ("pipeline", 1, "solo"),
        ("gpipe * data(2)", 6, "pipeline(3, schedule=gpipe) * data(2)"),
        ("tensor(2) * zero3", 8, "tensor(2) * zero(4, level=3)"),
        ("server", 3, "server(2, servers=1, consistency=bsp)"),
        ("data(2) * asp", 5, "data(2) * server(2, servers=1, consistency=asp)"),
    ],
)
def test_a_bare_name_takes_the_ranks_it_is_given(text, num_ranks, read):
    plan = Plan.parse(text, num_ranks=num_ranks)
    assert str(plan) == read
    plan.require_ranks(num_ranks)


@pytest.mark.parametrize(
    ("text", "given", "error_text"),
    [
        ("data * zero", {"num_ranks": 4}, "'data * zero' omits the ranks of data and zero; give a number"),
        ("data", {}, "'data' omits the ranks of data; write data(2), or give num_ranks"),
        ("data(2) * zero", {"num_ranks": 5}, "cannot use 5 ranks; the ranks of its strategies must multiply to"),
        ("server", {"num_ranks": 1}, "'server' cannot use 1 ranks;"),
        ("zeroo(2)", {}, "there is no strategy 'zeroo'; did you mean zero? the strategies are solo, data, zero,"),
        ("fsdp(2)", {}, "there is no strategy 'fsdp'; here fsdp is zero3; the strategies are solo, data,"),
        ("GPipe(2)", {}, "there is no strategy 'GPipe'; did you mean gpipe?"),
        ("quantum(2)", {}, "there is no strategy 'quantum'; the strategies are solo, data,"),
        ("quantum(2)", {}, "one of your own is given as an object in Python: strategy=MyStrategy(2)"),
        ("data(2, level=1)", {}, "data has no option 'level=1'; its options are update="),
        ("zero(2, depth=1)", {}, "zero has no option 'depth=1'; its options are level="),
        ("pipeline(2, gpipe)", {}, "pipeline has no option 'gpipe'; its options are schedule=, replicas=, balance="),
        ("zero(2, level=1, level=2)", {}, "zero in 'zero(2, level=1, level=2)' has level= twice; give it once"),
        ("zero(2, level=high)", {}, "level=high in 'zero(2, level=high)' must be whole numbers"),
        ("pipeline(2, balance=(1,b))", {}, "balance=(1,b) in 'pipeline(2, balance=(1,b))' must be whole numbers"),
        ("data(0)", {}, "data in 'data(0)' needs the number of ranks along its axis first: data(2)"),
        ("data(-2)", {}, "data in 'data(-2)' needs the number of ranks along its axis first"),
        ("data(two)", {}, "data in 'data(two)' needs the number of ranks along its axis first"),
        ("data()", {}, "data in 'data()' needs the number of ranks along its axis first"),
        ("solo(2)", {}, "solo is one rank and has no arguments; write solo, not solo(2)"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_text_to_write(text, given, error_text):
    assert error_text in refusal(text, **given)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data(2) * zero(2", 10),
        ("data(2) ** zero(2)", 9),
        ("data(2) * data(2) * ", 20),
        ("data(2) + zero(2)", 0),
        ("pipeline(2))", 0),
    ],
)
def test_what_is_no_strategy_gets_a_caret(text, place):
    message, line, caret = refusal(text).splitlines()
    assert "is not a strategy; write name(ranks, option=value), joined by *" in message
    assert (line, caret) == (f"  {text}", f"  {' ' * place}^")


def test_an_empty_plan_is_no_plan():
    assert "'' is not a strategy" in refusal("")


def test_a_plan_for_other_ranks_names_both_numbers_and_its_axes():
    plan = Plan.parse("pipeline(4) * data(3)")
    with pytest.raises(PlanError) as caught:
        plan.require_ranks(8)
    assert str(caught.value) == (
        "pipeline(4) * data(3) needs 12 ranks (stage=4, data=3), but there are 8; start 12 ranks, or change the "
        "numbers in the plan"
    )
    with pytest.raises(PlanError, match="but there is 1; start 12 ranks"):
        plan.require_ranks(1)


def test_a_plan_knows_its_ranks_and_its_mesh():
    plan = Plan.parse("pipeline(2, replicas=(2,1)) * data(2) * server(2, servers=3)")
    assert plan.num_ranks == 3 * 2 * 2 + 3
    assert plan.mesh.describe() == "stage=2, data=2, worker=2"
    assert Plan().num_ranks == 1


@pytest.mark.parametrize(
    ("make", "error_text"),
    [
        (lambda: Plan(num_microbatches=0), "a plan needs at least 1 microbatch, not 0"),
        (
            lambda: Plan(passes=("fuse",)),
            "there is no pass 'fuse'; the passes are overlap, recompute, partition_activations, gather_outputs, prefetch, offload",
        ),
        (
            lambda: Plan(passes=("prefetch:-1",)),
            "the pass 'prefetch:-1' does not say how many computations before their use gathers start; write prefetch "
            "for one, prefetch:2 for two, or prefetch:0, which is as without it",
        ),
        (
            lambda: Plan(passes=("prefetch", "prefetch:2")),
            "the passes prefetch and prefetch:2 both say how early gathers start; drop one of the two",
        ),
        (lambda: Plan((Data(0),)), "data(0) has 0 ranks; give 1 or more"),
        (lambda: Plan((Zero(-1),)), "zero(-1, level=1) has -1 ranks; give 1 or more"),
    ],
)
def test_a_plan_made_of_values_is_checked_like_one_made_of_text(make, error_text):
    with pytest.raises(PlanError) as caught:
        make()
    assert str(caught.value) == error_text


@pytest.mark.parametrize(
    ("passes", "depth"),
    [((), 0), (("overlap",), 0), (("prefetch:0",), 0), (("overlap", "prefetch"), 1), (("prefetch:12", "overlap"), 12)],
)
def test_a_plan_knows_how_early_gathers_start(passes, depth):
    plan = Plan((Zero(2, level=3),), passes=passes)
    assert plan.prefetch_depth == Plan.from_yaml(plan.to_yaml()).prefetch_depth == depth


@pytest.mark.parametrize("depth", ["", "two", "1.5", "1_0", "²", "1" * 5000, " 1"])
def test_a_depth_that_is_no_whole_number_is_refused(depth):
    with pytest.raises(PlanError, match="does not say how many computations before their use gathers start"):
        Plan(passes=(f"prefetch:{depth}",))


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("solo", 2),
        ("data(3)", 6),
        ("pipeline(2) * zero(2)", 4),
        ("tensor(2) * data(2)", 4),
        ("data(2) * server(3)", 12),
        ("pipeline(2, replicas=(2,2))", 2),
    ],
)
def test_replicas_and_workers_multiply_the_microbatches_and_nothing_else_does(text, micros):
    assert Plan.parse(text, num_microbatches=2).global_num_microbatches == micros


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_sizes():
    plan = Plan.parse("data(4)", num_microbatches=2)
    plan.require_batch(32)
    with pytest.raises(
        PlanError, match=r"a batch of 30 samples cannot be split into the 8 equal microbatches of data\(4\)"
    ):
        plan.require_batch(30)
    with pytest.raises(PlanError, match="give batch_size=24 or 32, or give another num_microbatches"):
        plan.require_batch(30)
    with pytest.raises(PlanError, match="give batch_size=8, or give another num_microbatches"):
        plan.require_batch(5)


@pytest.mark.parametrize(
    ("text", "batch", "micros"),
    [
        ("data(4)", 32, 1),
        ("pipeline(2)", 32, 8),
        ("pipeline(2)", 12, 6),
        ("pipeline(2) * data(2)", 8, 4),
        ("pipeline(2, replicas=(2,1))", 12, 6),
        ("pipeline(2)", 7, 7),
        ("pipeline(2)", 11, 1),
        ("pipeline(2, replicas=(2,3))", 7, 6),
    ],
)
def test_a_pipeline_takes_as_many_microbatches_as_it_can_use_and_the_batch_allows(text, batch, micros):
    assert Plan.parse(text).with_microbatches_for(batch).num_microbatches == micros


@pytest.mark.parametrize(
    ("text", "batch", "micros"),
    [("pipeline(2)", 8, 4), ("pipeline(2)", 7, 1), ("pipeline(2) * data(2)", 8, 2), ("pipeline(4)", 32, 16)],
)
def test_microbatches_have_as_many_samples_as_they_need_at_least(text, batch, micros):
    assert Plan.parse(text).with_microbatches_for(batch, min_samples=2).num_microbatches == micros


@pytest.mark.parametrize(
    ("text", "need"),
    [
        *[("solo", "whole"), ("data(2)", "whole"), ("zero2(2)", "whole"), ("server(2)", "whole")],
        *[
            ("zero3(2)", "prefer_blocks"),
            ("server(2, servers=2)", "prefer_blocks"),
            ("zero3(2) * data(2)", "prefer_blocks"),
        ],
        *[("pipeline(2) * zero3(2)", "blocks"), ("tensor(2) * pipeline(2)", "tensor_parallel")],
    ],
)
def test_a_plan_needs_the_model_cut_as_finely_as_its_most_demanding_strategy_does(text, need):
    assert Plan.parse(text).granularity == need


def test_overlap_cuts_no_model():
    assert Plan(Plan.parse("data(2)").strategies, 1, ("overlap",)).granularity == "whole"


def test_a_bare_name_takes_very_many_ranks_at_once():
    assert str(Plan.parse("pipeline(2) * data", num_ranks=1_000_000)) == "pipeline(2) * data(500000)"
    with pytest.raises(PlanError, match="cannot use 1000001 ranks;"):
        Plan.parse("pipeline(2) * data", num_ranks=1_000_001)


MANY = "9" * 5000


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"data({MANY})", "the number of ranks of data"),
        (f"data(2, sync_every={MANY})", "sync_every"),
        (f"data(2, bucket={MANY}MiB)", "bucket"),
        (f"gpipe(2, chunks={MANY})", "chunks"),
        (f"pipeline(2, balance=({MANY},1))", "balance"),
        (f"pipeline(2, split_points=a:{MANY})", "the stage of a"),
    ],
)
def test_a_number_with_too_many_digits_is_refused(text, what):
    assert refusal(text) == f"{what} has 5000 digits; give at most 20"


def test_an_axis_with_too_many_ranks_is_refused():
    message = "data in 'data(1000001)' has 1000001 ranks along its axis; give at most 1000000"
    assert refusal("data(1000001)") == message
    assert Plan.parse("data(1000000)").num_ranks == 1_000_000


def test_a_number_that_is_not_written_in_plain_digits_is_refused():
    assert "must be a positive number in digits" in refusal(f"data(2, compress=topk:{MANY})")
    assert "must be a finite number" in refusal("ddp(2, bucket_cap_mb=inf)")
    assert "needs the number of ranks along its axis first" in refusal("data(\N{SUPERSCRIPT TWO})")


@pytest.mark.parametrize("text", [f"data(2, {'x=1,' * 25_000})", "data(2)*" * 12_500 + "data(2)", "(" * 100_000])
def test_a_text_that_would_take_too_long_to_read_is_refused(text):
    assert refusal(text) == f"the text of a plan has {len(text)} characters; write at most 10000"
