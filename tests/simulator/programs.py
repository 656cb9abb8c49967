"""Compiled plans to be simulated, and cost models that distinguish them."""

from functools import lru_cache

from counterpoint.compiler.compile import compile as compile_plan, message_size_fn
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.text import parse_program
from counterpoint.simulator.cost_model import analytic_costs
from counterpoint.world.cluster import Cluster, Device, Link


@lru_cache(64)
def compile_text(text, *, m=1, blocks=4, tied=False, passes=(), verify=True):
    plan = Plan.parse(text, num_microbatches=m)
    plan = Plan(plan.strategies, m, passes)
    return compile_plan(plan, linear_chain(blocks, tied=tied), samples_per_micro=2, verified=verify)


def program(*rows):
    return parse_program("\n".join(rows))


def size_fn_for(made, samples=2):
    return message_size_fn(made.model, samples)


def build_costs(made, cost_per_s=1e4, latency_s=1e-4, bytes_per_s=1e8):
    """Costs in which computing and communication take about as long as each other."""
    cluster = Cluster(Device(cost_per_s=cost_per_s), Link(latency_s, bytes_per_s))
    return analytic_costs(made.model, cluster, size_fn_for(made), samples_per_microbatch=2)


class FakeCosts:
    """One tick for every forward, backward and update, and the given ticks for link time and servers."""

    def __init__(self, link_s=1.0, server_update_s=(1.0, 1.0)):
        self.on_link_s = link_s
        self.on_server_s = server_update_s

    def compute_s(self, instruction, fraction):
        return float(fraction > 0)

    def launch_overhead_s(self, instruction):
        return 0.0

    def grad_accumulate_s(self, block):
        return 0.0

    def link_s(self, instruction, fraction, rank):
        return self.on_link_s

    def shared_link_s(self, instruction, fraction, rank):
        return 0.0

    def cpu_s(self, instruction, fraction, rank, *, shares_memory=False):
        return 0.0

    def offload_s(self, instruction, fraction):
        return 0.0

    def is_streamed(self, instruction, rank):
        return False

    def memory_pass_s(self, instruction):
        return 0.0

    def server_update_s(self, unit, server, worker):
        return self.on_server_s
