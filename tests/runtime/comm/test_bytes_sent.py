"""Bytes that really pass: sums are carried out as rings of messages, and every message is weighed."""

import math
from fractions import Fraction

import pytest

from counterpoint.fabric.collectives.algorithms import ring
from counterpoint.fabric.collectives.execute import execute
from counterpoint.fabric.collectives.schedule import rank_schedule
from counterpoint.fabric.fabric import CompletedWork
from tests.runtime.local_ranks import build_team, chain, make_batch

N = 4  # ranks
SHAPES = [(6, 6), (6,)] * 4  # of float64
SUM, GATHER = Fraction(2 * (N - 1), N), N - 1


def weight(*sizes):
    return sum(size(*shape) for shape in SHAPES for size in sizes)


CLOSED = {
    "": SUM * weight(lambda *s: 8 * math.prod(s)),
    "compress=fp16": SUM * weight(lambda *s: 2 * math.prod(s)),
    "compress=bf16": SUM * weight(lambda *s: 2 * math.prod(s)),
    "compress=int8": GATHER * weight(lambda *s: math.prod(s) + 8),
    "compress=twobit:0.01": GATHER * weight(lambda *s: math.ceil(math.prod(s) / 4)),
    "compress=sign": GATHER * weight(lambda *s: math.ceil(math.prod(s) / 8) + 8),
    "compress=topk:0.1": GATHER * weight(lambda *s: math.ceil(math.prod(s) / 10) * (4 + 8)),
    "compress=powersgd:2": SUM * weight(lambda *s: 8 * (2 * sum(s) if len(s) == 2 else s[0])),
    "reduce=adasum": GATHER * weight(lambda *s: 8 * math.prod(s)),
}
"""The bytes that a rank sends in a step on average, written out by hand."""


class Weighing:
    """A fabric on which sums and gathers are rings of messages."""

    def __init__(self, fabric):
        self.fabric, self.sent, self.rank = fabric, 0, fabric.rank

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def send(self, peer, label, tensors):
        self.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.fabric.send(peer, label, tensors)

    def irecv(self, peer, label, like):
        return lambda: self.fabric.recv(peer, label)

    def all_reduce(self, label, tensor, group, op="sum"):
        execute(self, rank_schedule(ring(len(group)), group, self.rank), label, [tensor])
        tensor.div_(len(group) if op == "mean" else 1)
        return CompletedWork()

    def all_gather(self, label, whole, bounds, group):
        at, count = group.index(self.rank), len(group)
        for hop in range(count - 1):
            mine, theirs = (at - hop) % count, (at - hop - 1) % count
            self.send(group[(at + 1) % count], label, [whole[bounds[mine] : bounds[mine + 1]]])
            (came,) = self.fabric.recv(group[at - 1], label)
            whole[bounds[theirs] : bounds[theirs + 1]] = came
        return CompletedWork()


def weighed(plan, num_steps):
    """Return the bytes that ranks have sent on average, and those that the plan says."""
    with build_team(plan, model=chain(4), share_params_on_host=False) as one:
        for rank in one.ranks.values():
            rank.interpreter.communication.fabric = Weighing(rank.interpreter.fabric)
        for number in range(num_steps):
            one.step(number, make_batch(N))
        sent = [rank.interpreter.communication.fabric.sent for rank in one.ranks.values()]
        return Fraction(sum(sent), N), num_steps * one.compiled.sent_bytes()[0]


@pytest.mark.parametrize("option", CLOSED)
def test_messages_of_a_step_weigh_what_the_closed_formula_says(option):
    sent, said = weighed(f"data({N}, {option})" if option else f"data({N})", num_steps=1)
    assert sent == said == CLOSED[option]


def test_eight_steps_without_synchronization_but_at_their_end_weigh_one_sum():
    sent, said = weighed(f"data({N}, sync_every=8)", num_steps=8)
    assert sent == said == CLOSED[""]
