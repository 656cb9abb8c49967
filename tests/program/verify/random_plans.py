"""Random plans on at most twelve ranks, legal or not; and what makes one legal."""

from dataclasses import replace
from itertools import pairwise
from math import lcm

from hypothesis import strategies as st

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.model.dataflow import INPUT, ValueSpec
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.compression import SHARD_CODECS
from counterpoint.strategies.data import Data
from counterpoint.strategies.easgd import ElasticAveraging
from counterpoint.strategies.parameter_server import Server
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULES
from counterpoint.strategies.tensor import Tensor
from counterpoint.strategies.tree_reduce import TreeReduce
from counterpoint.strategies.zero import Zero

MOST_RANKS = 12
WIDTH = 12


def compile_text(text, *, m=1, blocks=2, tied=False, passes=(), samples=1, skips=False):
    """What becomes of a plan on a chain of equal blocks of 256 x 256 float32 weights, or on them with skips."""
    plan = replace(Plan.parse(text, num_microbatches=m), passes=passes)
    model = linear_chain(blocks, tied=tied)
    return compile_plan(plan, unet(model) if skips else model, samples_per_micro=samples)


def unet(model):
    """The blocks as a U-Net: the last one also reads what the first one makes, the last but one the second's."""
    last = model.num_blocks - 1
    readers = [tuple(sorted({block + 1, max(last - block, block + 1)})) for block in range(last)]
    size = model.blocks[0].output_bytes
    compiled = (ValueSpec(block, read, size) for block, read in enumerate(readers))
    return replace(model, values=(ValueSpec(INPUT, (0,)), *compiled))


@st.composite
def models_with_shared_weights(draw, num_blocks):
    """A chain whose blocks share weights at random: every set of blocks may be a unit."""
    users = st.sets(st.integers(0, num_blocks - 1), min_size=1)
    sets = draw(st.lists(users, max_size=4))
    owned = [[f"own{block}"] for block in range(num_blocks)]
    params = [Param(f"own{block}", (WIDTH,)) for block in range(num_blocks)]
    for index, blocks in enumerate(sets):
        params.append(Param(f"shared{index}", (WIDTH, 1 + index)))
        for block in blocks:
            owned[block].append(f"shared{index}")
    pieces = [LayerSpec(f"piece{block}", tuple(names), output_bytes=8) for block, names in enumerate(owned)]
    blocks = tuple(Block((piece,), index) for index, piece in enumerate(pieces))
    return ModelSpec(blocks, tuple(params))


@st.composite
def models_with_skips(draw, model):
    """The same blocks, but what they make is read by any blocks behind them; not all of it is learned."""
    last = model.num_blocks - 1
    compiled = [ValueSpec(INPUT, (0,))]
    for _ in range(draw(st.integers(0, 6)) if last else 0):
        maker = draw(st.integers(0, last - 1))
        readers = draw(st.sets(st.integers(maker + 1, last), min_size=1))
        compiled.append(ValueSpec(maker, tuple(sorted(readers)), draw(st.integers(0, 8)), draw(st.booleans())))
    return replace(model, values=tuple(compiled))


@st.composite
def models(draw):
    num_blocks = draw(st.integers(1, 6))
    if draw(st.booleans()):
        model = draw(models_with_shared_weights(num_blocks))
    else:
        model = linear_chain(num_blocks, width=WIDTH, tied=draw(st.booleans()))
    return draw(models_with_skips(model)) if draw(st.booleans()) else model


def degrees(most):
    return st.integers(2, most)


TESTED_SCHEDULES = [(schedule.name, chunks) for schedule in SCHEDULES for chunks in schedule.chunk_counts[:2]]
"""Each with a number of chunks per stage, of which the two lowest are tried."""
CODECS = ["fp16", "bf16", "int8", "int4", "twobit", "twobit:0.25", "sign", "topk", "topk:0.3", "powersgd", "powersgd:3"]


def replicas(most):
    """Replicas that sum their gradients as they are, in a code, or by Adasum."""
    return st.one_of(
        st.builds(Data, degrees(most)),
        st.builds(Data, degrees(most), compress=st.sampled_from(CODECS)),
        st.builds(Data, degrees(most), reduce=st.just("adasum")),
    )


@st.composite
def placements(draw, model, stages):
    """Runs of blocks that lie anywhere, each stage with one or more of them."""
    count = draw(st.integers(stages, model.num_blocks))
    heads = [0, *sorted(draw(st.permutations(range(1, model.num_blocks)))[: count - 1])]
    others = draw(st.lists(st.integers(0, stages - 1), min_size=count - stages, max_size=count - stages))
    owners = draw(st.permutations([*range(stages), *others]))
    names = [model.blocks[head].layers[0].name for head in heads]
    return Pipeline(stages, "gpipe", split_points=tuple(f"{name}:{at}" for name, at in zip(names, owners, strict=True)))


@st.composite
def pipelines(draw, model, num_micros, most):
    stages = draw(st.integers(2, min(most, model.num_blocks)))
    if draw(st.integers(0, 4)) == 4:
        return draw(placements(model, stages))
    divisors = [count for count in (1, 2, 3) if num_micros % count == 0]
    schedule, chunks = draw(
        st.sampled_from([kind for kind in TESTED_SCHEDULES if stages * kind[1] <= model.num_blocks])
    )
    replicas = draw(st.just(()) | st.tuples(*[st.sampled_from(divisors)] * stages)) if chunks == 1 else ()
    if sum(replicas) > most:
        replicas = ()
    balance = ()
    if draw(st.booleans()):
        cuts = draw(st.permutations(range(1, model.num_blocks)))[: stages * chunks - 1]
        stops = [0, *sorted(cuts), model.num_blocks]
        balance = tuple(after - before for before, after in pairwise(stops))
    recompute = draw(st.sampled_from(["never", "except_last", "always"]))
    return Pipeline(stages, schedule, replicas, balance, chunks, recompute=recompute)


@st.composite
def servers(draw, most):
    degree = draw(st.integers(2, most - 1))
    count = draw(st.integers(1, most - degree))
    consistency = draw(st.sampled_from(["bsp", "ssp", "asp"]))
    staleness = draw(st.integers(0, 3)) if consistency == "ssp" else 0
    return Server(degree, count, consistency, staleness, draw(st.sampled_from(["", "", "int8", "twobit", "topk:0.3"])))


def centers(most):
    """Servers that draw workers to a center, or give them weights now and then: with them a plan ends."""
    parts = st.sampled_from(["0.5", "0.125"])
    drawn = st.builds(ElasticAveraging, st.integers(2, most - 1), st.integers(1, 2), parts, st.sampled_from([1, 3]))
    return drawn | st.builds(Server, st.integers(2, most - 1), st.just(1), st.just("asp"), pull_every=st.just(4))


def trees(most):
    shapes, sends = (
        st.sampled_from(["binomial", "star", "chain"]),
        st.sampled_from(["after_backward", "during_backward"]),
    )
    return st.builds(TreeReduce, degrees(most), shapes, sends)


def outermost_replicas(inner):
    """Replicas of all that stands before them."""
    if Zero in inner:
        return st.builds(Data, degrees(3))
    if TreeReduce in inner:
        return trees(3) | replicas(3)
    apart = st.builds(Data, degrees(3), sync_every=st.sampled_from([2, 8]))
    return replicas(3) if Server in inner else replicas(3) | apart


def passes_for(strategies):
    """What is said once to be recomputed is not said twice."""
    if any(isinstance(strategy, Pipeline) and strategy.recompute != "never" for strategy in strategies):
        return st.sampled_from([(), ("overlap",), ("overlap", "prefetch"), ("prefetch:2",)])
    prefetching = [("overlap", "recompute:50%", prefetch) for prefetch in ("prefetch", "prefetch:3")]
    return st.sampled_from([(), ("overlap",), ("recompute",), *prefetching])


def uses_tensor_parallel(strategies):
    return any(isinstance(strategy, Tensor) for strategy in strategies)


KINDS = ["tensor", "pipeline", "data", "tree", "zero", "server", "center", "more data"]


@st.composite
def legal_plans(draw, model):
    """Strategies in an order that makes sense, each only while there is room for it."""
    num_micros = draw(st.sampled_from([1, 2, 3, 4, 6]))
    chosen, ranks = [], 1

    def add(strategy):
        nonlocal ranks
        if strategy.num_ranks(ranks) <= MOST_RANKS:
            chosen.append(strategy)
            ranks = strategy.num_ranks(ranks)

    kinds = draw(st.sets(st.sampled_from(KINDS)))
    if "tensor" in kinds and any(layer.tp for layer in model.layers):
        add(Tensor(draw(degrees(4))))
    if "pipeline" in kinds and model.num_blocks > 1:
        add(draw(pipelines(model, num_micros, MOST_RANKS)))
    if "data" in kinds:
        add(draw(replicas(4)))
    has_tree = "tree" in kinds
    if has_tree:
        add(draw(trees(4)))
    is_coded = any(isinstance(strategy, Data) and strategy.codec for strategy in chosen)
    served = not {"server", "center"}.isdisjoint(kinds) and not has_tree and not uses_tensor_parallel(chosen)
    if served:
        add(draw(servers(4) if "server" in kinds else centers(4)))
    elif "zero" in kinds and not has_tree:
        options = draw(st.sampled_from([(1,), (2,), (3,), (3, "off"), (3, "on", 2 * WIDTH), (3, "off", 2 * WIDTH)]))
        options = (1,) if is_coded else options
        weights = draw(st.sampled_from(["", *SHARD_CODECS])) if options[0] == 3 else ""
        gradients = draw(st.sampled_from(["", *SHARD_CODECS]))
        zero = Zero(draw(degrees(4)), *options)
        add(replace(zero, quantized_weights=weights, quantized_gradients=gradients))
    if "more data" in kinds and not any(
        strategy_kind(strategy) in {"ssp", "asp", "elastic averaging"} for strategy in chosen
    ):
        add(draw(outermost_replicas({type(strategy) for strategy in chosen})))
    return Plan(tuple(chosen), num_micros, draw(passes_for(chosen)))


@st.composite
def delayed_plans(draw):
    """A model, and a plan that applies gradients a step late."""
    model = draw(models())
    inner = [strategy for strategy in draw(legal_plans(model)).strategies if isinstance(strategy, Tensor | Pipeline)]
    more = draw(st.sampled_from([(), (Data(2),)]))
    strategies = (*inner, *(more if Plan(tuple(inner)).num_ranks <= 3 else ()), Data(draw(degrees(2)), staleness=1))
    return model, Plan(strategies, draw(st.sampled_from([6, 12])), draw(st.sampled_from([(), ("overlap",)])))


@st.composite
def async_pipelines(draw):
    """A chain of blocks, and a plan whose pipeline never flushes, in front of which layers may be sliced."""
    stages, count = draw(st.integers(2, 4)), draw(st.integers(0, 2))
    replicas = draw(st.just((1,) * stages) | st.tuples(*[st.integers(1, 3)] * stages))
    schedule = draw(st.sampled_from(["pipedream", "pipedream_2bw"]))
    pipeline = Pipeline(stages, schedule, replicas, recompute=draw(st.sampled_from(["never", "except_last", "always"])))
    if schedule == "pipedream" and draw(st.booleans()):
        pipeline = replace(pipeline, vertical_sync="on")
    sliced = (Tensor(2),) if draw(st.booleans()) and sum(replicas) <= MOST_RANKS // 2 else ()
    least = pipeline.usable_microbatches(1)
    per_body = least + count * lcm(*replicas)
    passes = draw(st.sampled_from([(), ("overlap",)]))
    model = linear_chain(stages + draw(st.integers(0, 2)), width=WIDTH)
    return draw(models_with_skips(model)) if draw(st.booleans()) else model, Plan((*sliced, pipeline), per_body, passes)


@st.composite
def legal_cases(draw):
    """A model, a plan that fits it, and how many samples a microbatch has."""
    model = draw(models())
    return model, draw(legal_plans(model)), draw(st.integers(1, 3))


def any_strategy():
    return st.one_of(
        st.builds(Tensor, st.sampled_from([2, 4])),
        st.builds(Pipeline, st.just(2), st.sampled_from(["gpipe", "one_f_one_b"])),
        st.builds(Data, st.sampled_from([2, 3])),
        st.builds(Data, st.just(2), compress=st.sampled_from(["sign", "powersgd"])),
        st.builds(Zero, st.just(2), st.sampled_from([1, 2, 3])),
        st.builds(Server, st.just(2), st.just(1), st.sampled_from(["bsp", "ssp", "asp"])),
        st.builds(ElasticAveraging, st.just(2)),
        trees(3),
    )


def strategy_kind(strategy):
    match strategy:
        case Server(consistency=consistency):
            return consistency
        case Data(compress=code) if code:
            return "coded data"
        case TreeReduce():
            return "tree"
        case ElasticAveraging():
            return "elastic averaging"
        case Zero(level=level) if level > 1:
            return "zero that shares gradients"
        case _:
            return type(strategy).__name__.lower()


ZERO_KINDS = {"zero", "zero that shares gradients"}
ASYNC_SERVERS = {"ssp", "asp"}
"""Servers that do not wait."""
MAY_NOT_FOLLOW = {
    "tensor": {"tensor", "elastic averaging", *ASYNC_SERVERS},
    "pipeline": {"pipeline", "data", "coded data", "tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "data": {"elastic averaging", *ASYNC_SERVERS},
    "coded data": {"elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "tree": {"bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "zero": {"tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "zero that shares gradients": {"tree", "bsp", "elastic averaging", "coded data", *ASYNC_SERVERS, *ZERO_KINDS},
    "bsp": {"tensor", "tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "ssp": {"tensor", "tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "asp": {"tensor", "tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
    "elastic averaging": {"tensor", "tree", "bsp", "elastic averaging", *ASYNC_SERVERS, *ZERO_KINDS},
}


def can_be_composed(strategies):
    """Whether no strategy stands behind one that it cannot be applied to."""
    kinds = [strategy_kind(strategy) for strategy in strategies]
    return not any(MAY_NOT_FOLLOW[name] & set(kinds[:at]) for at, name in enumerate(kinds))
