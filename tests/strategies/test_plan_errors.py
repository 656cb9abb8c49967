"""What cannot be combined, or not on this model, with the values, the rule and the remedy."""

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.errors import PlanError
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan


def refusal(text, blocks=4, micros=1, model=None):
    with pytest.raises(PlanError) as caught:
        compile_plan(Plan.parse(text, num_microbatches=micros), model or linear_chain(blocks))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data(2) * pipeline(2)", "pipeline(2) must come before data, zero and server in a plan"),
        ("data(2) * pipeline(2)", "write pipeline(2) * data(...), not data(...) * pipeline(2)"),
        ("zero3(2) * gpipe(2)", "pipeline(2, schedule=gpipe) must come before data, zero and server"),
        ("server(2) * pipeline(2)", "pipeline(2) must come before data, zero and server"),
        (
            "pipeline(2) * pipeline(2)",
            "stages 2 times, and a plan has one pipeline; give it all stages, pipeline(4), or",
        ),
        ("asp(2) * data(2)", "data(2) stands after an asynchronous server, whose updates cannot be summed"),
        ("asp(2) * data(2)", "write data(2) before server(...)"),
        ("zero(2) * zero(2)", "stands in a plan that is shared out already; write one zero(...) with all ranks"),
        ("zero3(2) * zero1(2)", "stands in a plan that is shared out already"),
        ("bsp(2) * zero(2)", "stands in a plan whose weights live on servers; write zero(...) or server(...)"),
        ("asp(2) * zero(2)", "stands in a plan whose weights live on servers"),
        ("zero(2) * server(2)", "stands behind zero, whose ranks hold shares that no single push could carry"),
        ("zero3(2) * asp(2)", "write data(...) instead of zero(...)"),
        ("bsp(2) * bsp(2)", "stands in a plan that has servers already; write one server(...)"),
        ("asp(2) * bsp(2)", "stands in a plan that has servers already"),
        ("tensor(2) * bsp(2)", "stands behind tensor, whose slices need a server each; write server(2, servers=1, con"),
        ("tensor(2) * asp(2)", "write server(2, servers=1, consistency=bsp) * tensor(...)"),
        ("tensor(2) * tensor(2)", "tensor(2) stands in a plan that is sliced already; write one tensor(...)"),
        ("asp(2) * tensor(2)", "tensor(2) stands behind an asynchronous server"),
        ("zero(2) * data(2, sync_every=8)", "data(2, sync_every=8) stands behind zero or a shared update"),
        ("data(2, update=sharded) * data(2, staleness=1)", "write data(...) in its place"),
        ("server(2) * data(2, sync_every=8)", "stands behind server, whose workers update nothing"),
        ("server(2) * data(2, staleness=1)", "write data(2, staleness=1) without server"),
        ("asp(2) * data(2, sync_every=8)", "data(2, sync_every=8) stands behind server"),
        (
            "server(2) * tree(2)",
            "tree(2) stands behind server, which keeps the weights already; write data(...) in its",
        ),
        ("asp(2) * tree(2)", "tree(2) stands behind server, which keeps the weights already"),
        ("zero(2) * tree(2)", "tree(2) stands where gradients have been shared out, but hands on whole ones"),
        (
            "tree(2) * zero(2)",
            "stands behind tree, of whose copies only the first updates, so that there is nothing to",
        ),
        ("tree(2) * data(2, update=sharded)", "write zero(...) with all ranks, without tree(...)"),
        ("tree(2) * server(2)", "stands behind tree, of whose copies only the first updates; write data(...) in its"),
        ("tree(2) * data(2, sync_every=8)", "data(2, sync_every=8) stands behind tree, of whose copies only the first"),
        ("tree(2) * data(2, staleness=1)", "data(2, staleness=1) stands behind tree"),
        ("tree(2) * pipeline(2)", "pipeline(2) must come before data, zero and server"),
        ("data(2, compress=int8) * data(2, staleness=1)", "stands behind gradients that are summed in the code int8"),
    ],
)
def test_strategies_that_cannot_follow_each_other_say_what_to_write(text, said):
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("text", "given", "said"),
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
            "3 microbatches do not divide over the 2 replicas of a stage",
        ),
        ("pipeline(2, replicas=(2,1))", {"micros": 3}, "give a multiple of 2 microbatches"),
        (
            "interleaved(2, chunks_per_stage=3)",
            {},
            "pipeline(2, schedule=interleaved, chunks_per_stage=3) has 6 chunks, 3 for each of 2 stages, but the model has only 4 "
            "blocks; every chunk needs one: give fewer stages or chunks",
        ),
        ("tensor(3)", {}, "tensor(3) cannot slice hidden of block0: 256 does not divide by 3; give a number of ranks"),
        ("tensor(2, dims=heads)", {}, "slices heads, but the model has the dims hidden; name its dims with dims=..."),
        (
            "tensor(2)",
            {"model": linear_chain(2, tied=True)},
            "the model has no pair of linear layers that can be sliced",
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_model_says_why(text, given, said):
    assert said in refusal(text, **given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero(2, level=4)", "zero has the levels 1, 2 and 3, not 4; give level=1, level=2 or level=3"),
        (
            "pipeline(2, schedule=zigzag)",
            "there is no pipeline schedule 'zigzag'; the schedules are gpipe, interleaved, one_f_one_b, pipedream, "
            "pipedream_2bw, zero_bubble",
        ),
        (
            "pipeline(2, schedule=interleaved)",
            "schedule=interleaved is not made for chunks_per_stage=1 chunks per stage; give chunks_per_stage=2 or more",
        ),
        (
            "zero_bubble(2, chunks_per_stage=3)",
            "schedule=zero_bubble is not made for chunks_per_stage=3 chunks per stage; give chunks_per_stage=1 or chunks_per_stage=2",
        ),
        (
            "pipeline(2, schedule=pipedream, chunks_per_stage=2)",
            "schedule=pipedream is not made for chunks_per_stage=2 chunks per stage; give chunks_per_stage=1",
        ),
        (
            "gpipe(2, chunks_per_stage=2, replicas=(1,2))",
            "replicas=(1, 2) of pipeline(2) cannot have chunks_per_stage=2 chunks each: the schedules for several chunks take all "
            "stages to be alike; leave out one of the two, or write pipeline(2, chunks_per_stage=2) * data(...)",
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
        ("server(2, consistency=eventual)", "server has the consistencies bsp, ssp and asp, not 'eventual'"),
        (
            "server(2, consistency=ssp, fetch_every=2)",
            "fetch_every=2 of server is a number of steps, from 1, and 1 but with consistency=asp: ssp lets workers go "
            "on by the weights that it gives them",
        ),
        (
            "data(2, sync_every=0)",
            "sync_every=0, sync_first=0 of data are no numbers of steps; give sync_every=1 or more, and sync_first=0 "
            "or more",
        ),
        ("data(2, staleness=2)", "data has no staleness=2; there are two gradients: give staleness=0 or 1"),
        (
            "data(2, sync_first=9)",
            "sync_first=9 says how many steps sum gradients before sync_every=... begins; give sync_every=8, for one, "
            "as well",
        ),
        (
            "data(2, sync_every=8, staleness=1)",
            "data(2, sync_every=8, staleness=1) combines options of which each says what is done with a gradient; give "
            "one of update=sharded, sync_every=... and staleness=1",
        ),
        *(
            (
                f"data(2, {code}, {rhythm})",
                f"data(2, {code}, {rhythm}) has the code {code.partition('=')[2]}, but a code is for gradients that "
                "are summed in their own step, which neither sync_every nor staleness does; give one or the other",
            )
            for code in ("compress=int8", "reduce=adasum")
            for rhythm in ("sync_every=8", "staleness=1")
        ),
        (
            "data(2, sync_every=8) * data(2)",
            "data(2, sync_every=8) has steps that are not all alike, and data(2) stands behind it; write it last, "
            "outside of all that makes one replica",
        ),
        ("tree(2, shape=oak)", "tree has no shape=oak; give shape=binomial, shape=star or shape=chain"),
        ("tree(2, send=never)", "tree has no send=never; give send=after_backward or send=during_backward"),
        ("server(2, servers=0)", "server(2, servers=0) keeps its weights nowhere; give servers=1 or more"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_compiled(text, said):
    with pytest.raises(PlanError) as caught:
        Plan.parse(text)
    assert str(caught.value) == said


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
