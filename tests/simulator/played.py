"""Compositions to be simulated, and the costs that tell them apart."""

from counterpoint.compiler.compile import compile as compile_plan, sizes_in
from counterpoint.model.spec import chain
from counterpoint.plan import Plan
from counterpoint.program.text import parse_program
from counterpoint.simulator.costs import model_costs
from counterpoint.world.cluster import Cluster, Device, Link


def compiled(text, *, m=1, blocks=4, tied=False, passes=(), proves=True):
    plan = Plan.parse(text, num_microbatches=m)
    plan = Plan(plan.strategies, m, passes)
    return compile_plan(plan, chain(blocks, tied=tied), samples_per_micro=2, proves=proves)


def program(*rows):
    return parse_program("\n".join(rows))


def size_of_in(made, samples=2):
    return sizes_in(made.model, samples)


def costs_of(made, cost_per_s=1e4, latency_s=1e-4, bytes_per_s=1e8):
    """Costs in which computing and communication take about as long as each other."""
    cluster = Cluster(Device(cost_per_s=cost_per_s), Link(latency_s, bytes_per_s))
    return model_costs(made.model, cluster, size_of_in(made), samples_per_micro=2)


class Ticks:
    """One tick for every forward, backward and update, of whatever part, and as many as said for what is on a link."""

    def __init__(self, link_s=1.0, serve_s=(1.0, 1.0)):
        self.on_link_s = link_s
        self.on_server_s = serve_s

    def compute_s(self, word, part):
        return float(part > 0)

    def call_s(self, word):
        return 0.0

    def add_s(self, block):
        return 0.0

    def link_s(self, word, part, rank):
        return self.on_link_s

    def crossing_s(self, word, part, rank):
        return 0.0

    def hand_s(self, word, part, rank, *, has_one_copy=False):
        return 0.0

    def is_streamed(self, word, rank):
        return False

    def pass_s(self, word):
        return 0.0

    def serve_s(self, unit, server, worker):
        return self.on_server_s
