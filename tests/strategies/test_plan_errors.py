"""What cannot be combined, or not on this model, with the values, the rule and the remedy."""

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.errors import PlanError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULE_NAMES


def refusal(text, blocks=4, micros=1, model=None):
    with pytest.raises(PlanError) as caught:
        compile_plan(Plan.parse(text, num_microbatches=micros), model or linear_chain(blocks))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data(2) * pipeline(2)", "pipeline(2) must come before data, zero and server in a plan"),
        ("data(2) * pipeline(2)", "write pipeline(2) * data(...), not data(...) * pipeline(2)"),
        ("zero3(2) * gpipe(2)", "pipeline(2, schedule=gpipe) must come before data, zero and server"),
        ("server(2) * pipeline(2)", "pipeline(2) must come before data, zero and server"),
        (
            "pipeline(2) * pipeline(2)",
            "has 2 pipelines, and a plan can have one; give it all stages, pipeline(4), or write",
        ),
        ("asp(2) * data(2)", "data(2) comes after an asynchronous server, whose updates cannot be summed"),
        ("asp(2) * data(2)", "write data(2) before server(...)"),
        ("zero(2) * zero(2)", "is in a plan that is sharded already; write one zero(...) with all ranks"),
        ("zero3(2) * zero1(2)", "is in a plan that is sharded already"),
        ("bsp(2) * zero(2)", "is in a plan whose weights live on servers; write zero(...) or server(...)"),
        ("asp(2) * zero(2)", "is in a plan whose weights live on servers"),
        ("zero(2) * server(2)", "comes after zero, but a push has the whole gradient of a unit and zero shards it"),
        ("zero3(2) * asp(2)", "write data(...) instead of zero(...)"),
        ("bsp(2) * bsp(2)", "is in a plan that has servers already; write one server(...)"),
        ("asp(2) * bsp(2)", "is in a plan that has servers already"),
        (
            "tensor(2) * bsp(2)",
            "comes after tensor, each shard of which needs its own server; write server(2, servers=1, con",
        ),
        ("tensor(2) * asp(2)", "write server(2, servers=1, consistency=bsp) * tensor(...)"),
        ("tensor(2) * tensor(2)", "tensor(2) is in a plan with tensor already; write one tensor(...)"),
        ("asp(2) * tensor(2)", "tensor(2) comes after an asynchronous server"),
        ("zero(2) * data(2, sync_every=8)", "data(2, sync_every=8) comes after zero or update=sharded"),
        (
            "data(2, update=sharded) * data(2, staleness=1)",
            "write data(...) instead, so that each replica updates its own weights",
        ),
        ("server(2) * data(2, sync_every=8)", "comes after server, whose workers do not update"),
        ("server(2) * data(2, staleness=1)", "write data(2, staleness=1) without server"),
        ("asp(2) * data(2, sync_every=8)", "data(2, sync_every=8) comes after server"),
        (
            "server(2) * tree(2)",
            "tree(2) comes after server, which keeps the weights already; write data(...) instead",
        ),
        ("asp(2) * tree(2)", "tree(2) comes after server, which keeps the weights already"),
        ("zero(2) * tree(2)", "tree(2) comes after a strategy that shards gradients, but sends whole ones"),
        (
            "tree(2) * zero(2)",
            "comes after tree, where only the first replica updates, so that there is nothing to shard",
        ),
        ("tree(2) * data(2, update=sharded)", "write zero(...) with all ranks, without tree(...)"),
        ("tree(2) * server(2)", "comes after tree, where only the first replica updates; write data(...) instead"),
        (
            "tree(2) * data(2, sync_every=8)",
            "data(2, sync_every=8) comes after tree, where only the first replica updates",
        ),
        ("tree(2) * data(2, staleness=1)", "data(2, staleness=1) comes after tree"),
        ("tree(2) * pipeline(2)", "pipeline(2) must come before data, zero and server"),
        (
            "data(2, compress=int8) * data(2, staleness=1)",
            "cannot combine data(2, staleness=1) with all-reduces compressed by int8",
        ),
    ],
)
def test_strategies_that_cannot_follow_each_other_say_what_to_write(text, message):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        (
            "pipeline(5)",
            {},
            "the pipeline has 5 stages, but the model has only 4 blocks; every stage needs one",
        ),
        ("pipeline(2, balance=(1,2))", {}, "balance=(1, 2) adds up to 3 blocks, but the model has 4"),
        (
            "pipeline(2, replicas=(2,1))",
            {"micros": 3},
            "3 microbatches are not divisible by the 2 replicas of a stage",
        ),
        ("pipeline(2, replicas=(2,1))", {"micros": 3}, "give a multiple of 2 microbatches"),
        (
            "interleaved(2, chunks_per_stage=3)",
            {},
            "pipeline(2, schedule=interleaved, chunks_per_stage=3) has 6 chunks, 3 for each of 2 stages, but the model has only 4 "
            "blocks; every chunk needs one: give fewer stages or chunks",
        ),
        ("tensor(3)", {}, "tensor(3) cannot shard hidden of block0: 256 is not divisible by 3; give a number of ranks"),
        ("tensor(2, dims=heads)", {}, "shards heads, but the model has the dims hidden; name its dims with dims=..."),
        (
            "tensor(2)",
            {"model": linear_chain(2, tied=True)},
            "the model has no pair of linear layers that can be sharded",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_says_why(text, given, message):
    assert message in refusal(text, **given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "zero(2, level=3, reshard_after_forward=never)",
            "zero has no reshard_after_forward='never'; give off, which keeps weights from forward to backward, or on",
        ),
        (
            "zero(2, level=2, reshard_after_forward=off)",
            "zero(..., level=2) does not shard weights, so there is nothing to reshard; leave out "
            "reshard_after_forward, or give level=3",
        ),
        (
            "data(2, compress=onebit)",
            "compress=onebit is for the momentum of 1-bit Adam after its warm-up; also give compress_from=..., the "
            "freeze_step of OneBitAdam",
        ),
        (
            "data(2, compress_from=9)",
            "compress_from=9 of data is the number of steps before compress=... begins; give 1 or more together with "
            "compress=powersgd:2, for example",
        ),
        (
            "zero(2, level=3, quantized_weights=sign)",
            "zero has no quantized_weights=sign; give quantized_weights=int8 or quantized_weights=int4",
        ),
        (
            "zero(2, level=2, quantized_weights=int8)",
            "zero(..., level=2) keeps whole weights, which quantized_weights would round for good; give level=3, where "
            "shards stay exact, or leave it out",
        ),
        (
            "zero(2, level=3, persistence_threshold=-1)",
            "persistence_threshold=-1 is a number of elements; give 0, which is as without it, or more",
        ),
        (
            "zero(2, level=1, min_num_params=100)",
            "zero(..., level=1) does not shard weights, so all of them stay whole; leave out min_num_params, or give "
            "level=3",
        ),
        (
            "pipeline(2) * zero(2, level=3, min_num_params=100)",
            "zero(2, level=3, min_num_params=100) merges the blocks that the stages of pipeline(2) are made of; leave "
            "out min_num_params",
        ),
        (
            "zero(2, level=2, split_points=a)",
            "zero(..., level=2) does not shard weights, so all of them stay whole; leave out split_points, or give "
            "level=3",
        ),
        (
            "zero(2, level=3, split_points=a, min_num_params=9)",
            "zero(2) was given min_num_params and split_points, which both say what a unit is; give one of the two",
        ),
        (
            "zero(2, level=3, split_points=a:0+b:1)",
            "split_points of zero(2) has a:0, and stages are those of a pipeline; give the paths of modules alone: a",
        ),
        (
            "zero(2, level=3, split_points=a+a)",
            "split_points of zero(2) names 'a' 2 times; a module begins one unit",
        ),
        (
            "zero3(2, split_points=a) * pipeline(2)",
            "zero(2, level=3, split_points=a) merges the blocks that the stages of pipeline(2) are made of; leave out "
            "split_points",
        ),
        (
            "zero(2, level=2, persistence_threshold=100)",
            "zero(..., level=2) does not shard weights, so all of them stay whole; leave out persistence_threshold, or "
            "give level=3",
        ),
        ("zero(2, level=4)", "zero has the levels 1, 2 and 3, not 4; give level=1, level=2 or level=3"),
        (
            "pipeline(2, schedule=zigzag)",
            f"there is no pipeline schedule 'zigzag'; the schedules are {', '.join(SCHEDULE_NAMES)}",
        ),
        (
            "pipeline(2, schedule=interleaved)",
            "schedule=interleaved does not support chunks_per_stage=1; give chunks_per_stage=2 or more",
        ),
        (
            "zero_bubble(2, chunks_per_stage=3)",
            "schedule=zero_bubble does not support chunks_per_stage=3; give chunks_per_stage=1 or chunks_per_stage=2",
        ),
        (
            "pipeline(2, schedule=pipedream, chunks_per_stage=2)",
            "schedule=pipedream does not support chunks_per_stage=2; give chunks_per_stage=1",
        ),
        (
            "gpipe(2, chunks_per_stage=2, replicas=(1,2))",
            "replicas=(1, 2) of pipeline(2) needs chunks_per_stage=1, not 2: schedules for several chunks have the same number "
            "of ranks on all stages; drop one of the two, or write pipeline(2, chunks_per_stage=2) * data(...)",
        ),
        (
            "interleaved(2, balance=(1,2))",
            "balance=(1, 2) of pipeline(2) must be 4 positive numbers, one per chunk",
        ),
        (
            "pipeline(2, replicas=(1,2,3))",
            "replicas=(1, 2, 3) of pipeline(2) must be 2 positive numbers, one per stage",
        ),
        ("pipeline(2, balance=(4,0))", "balance=(4, 0) of pipeline(2) must be 2 positive numbers, one per stage"),
        (
            "server(2, consistency=ssp(3))",
            "there is no consistency=ssp(3); give bsp, ssp or asp; ssp(3) is now written consistency=ssp, staleness=3",
        ),
        ("server(2, consistency=eventual)", "there is no consistency=eventual; give bsp, ssp or asp"),
        (
            "server(2, consistency=ssp, pull_every=2)",
            "pull_every=2 of server must be a number of steps, and 1 unless consistency=asp: workers of ssp need new "
            "weights in every step",
        ),
        (
            "data(2, sync_every=0)",
            "sync_every=0, sync_first=0 of data are not numbers of steps; give sync_every=1 or more, and sync_first=0 "
            "or more",
        ),
        ("data(2, staleness=2)", "data has no staleness=2; give staleness=0 or staleness=1"),
        (
            "data(2, sync_first=9)",
            "sync_first=9 is the number of steps before sync_every=... begins; also give sync_every=8, for example",
        ),
        (
            "data(2, sync_every=8, staleness=1)",
            "data(2, sync_every=8, staleness=1) combines options that exclude each other; give one of "
            "update=sharded, sync_every=... and staleness=1",
        ),
        *(
            (
                f"data(2, {codec}, {delay})",
                f"data(2, {codec}, {delay}) combines {codec.partition('=')[2]} with sync_every or staleness, but a codec is "
                "for gradients that are all-reduced in their own step; give one of the two",
            )
            for codec in ("compress=int8", "reduce=adasum")
            for delay in ("sync_every=8", "staleness=1")
        ),
        (
            "data(2, sync_every=8) * data(2)",
            "data(2, sync_every=8) has several kinds of steps and must come last in a plan, but data(2) comes "
            "after it; write it last",
        ),
        ("tree(2, shape=oak)", "tree has no shape=oak; give shape=binomial, shape=star or shape=chain"),
        ("tree(2, send=never)", "tree has no send=never; give send=after_backward or send=during_backward"),
        ("server(2, servers=0)", "server(2, servers=0) has no server; give servers=1 or more"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_compiled(text, message):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name",
    ["tensor", "pipeline", "gpipe", "interleaved", "zero_bubble", "data", "tree", "zero1", "zero2", "zero3"],
)
def test_one_rank_along_an_axis_changes_nothing(name):
    with_one = compile_plan(Plan.parse(f"{name}(1) * data(2)"), linear_chain(2))
    without = compile_plan(Plan.parse("data(2)"), linear_chain(2))
    assert with_one.program == without.program
    assert with_one.cost.sent_bytes() == without.cost.sent_bytes()


def test_one_worker_with_a_server_is_legal():
    assert compile_plan(Plan.parse("server(1)"), linear_chain(2)).program.num_ranks == 2
