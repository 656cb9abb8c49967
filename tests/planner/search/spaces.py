"""Models and clusters for searches, and random changes of random configurations."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from counterpoint.model.spec import Block, ModelSpec, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.planner.search.configuration import SearchConfiguration
from counterpoint.planner.search.proposals import SearchSpace, propose
from counterpoint.strategies.data import Data
from counterpoint.world.cluster import Cluster, Level, Link
from tests.planner.models import layers
from tests.program.verify.random_plans import unet

WIRE = Link(latency_s=50e-6, bytes_per_s=125e6)
FLAT = Cluster(link=WIRE)
COPIES = Cluster(levels=(Level("host", 4, Link(5e-6, 5e9, is_shared_memory=True)), Level("network", 4, WIRE)))
HOSTS = Cluster(levels=(Level("host", 2, Link(5e-6, 5e9)), Level("network", 8, WIRE, is_shared=True)))


def transformer(num_layers: int, width: int = 64) -> ModelSpec:
    """Layers of two regions with tensor parallelism along different dims, between a table and a head without."""
    plain = linear_chain(2 * num_layers + 2, width=width)
    pieces = []
    for at, piece in enumerate(plain.layers):
        assert piece.tp is not None
        dim, is_end = "heads" if at % 2 else "hidden", at in {0, 2 * num_layers + 1}
        split = None if is_end else replace(piece.tp, dim=dim, dim_size=8)
        name = f"layers.{(at - 1) // 2}.{dim}"
        pieces.append(replace(piece, name=name, tp=split, cost=1e6 * (1 + at % 3), can_start_stage=not is_end))
    ends = [0, *range(1, len(pieces), 2), len(pieces)]
    return replace(plain, blocks=tuple(Block(tuple(pieces[a:b]), a) for a, b in pairwise(ends)))


MODELS: dict[str, ModelSpec] = {
    "layers": layers(8, cost=2e6),
    "transformer": transformer(3),
    "tied": linear_chain(6, tied=True),
    "ladder": unet(layers(6, cost=1e6)),
}


def random_plans(space: SearchSpace, seed: int) -> Iterator[Plan]:
    """Plans after successive random changes, starting with data parallelism."""
    draw = Random(seed)
    now = SearchConfiguration(data=Data(space.num_ranks))
    while True:
        now = propose(now, space, draw)
        yield now.plan(space.model, space.passes)
