"""Bytes that a step sends, with all-reduces and all-gathers run as rings of counted messages."""

import math
from fractions import Fraction
from functools import partial

import pytest

from counterpoint.fabric.collectives.algorithms import ring
from counterpoint.fabric.collectives.execute import execute
from counterpoint.fabric.collectives.schedule import rank_schedule
from counterpoint.fabric.fabric import CompletedWork
from counterpoint.optim.one_bit_adam import OneBitAdam
from tests.runtime.local_ranks import ADAMW, build_local_ranks, chain, make_batch

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


class RingFabric:
    """A fabric on which all-reduces and all-gathers are rings of counted messages; reduce-scatters are counted."""

    def __init__(self, fabric):
        self.fabric, self.sent, self.rank = fabric, 0, fabric.rank

    def __getattr__(self, name):
        return getattr(self.fabric, name)

    def send(self, peer, label, tensors):
        self.sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.fabric.send(peer, label, tensors)

    def irecv(self, peer, label, like):
        return lambda: self.fabric.recv(peer, label)

    def all_reduces_in_16_bits(self, tensor, group):
        """Return False: partial sums of 16-bit floats would be rounded at each hop."""
        return False

    def all_reduce(self, label, tensor, group, op="sum"):
        execute(self, rank_schedule(ring(len(group)), group, self.rank), label, [tensor])
        tensor.div_(len(group) if op == "mean" else 1)
        return CompletedWork()

    def reduce_scatter(self, label, whole, bounds, group, op="sum"):
        position = group.index(self.rank)
        self.sent += (len(whole) - (bounds[position + 1] - bounds[position])) * whole.element_size()
        return self.fabric.reduce_scatter(label, whole, bounds, group, op)

    def all_to_all(self, label, whole, counts, group):
        position = group.index(self.rank)
        self.sent += (len(whole) - counts[position][position]) * whole.element_size()
        return self.fabric.all_to_all(label, whole, counts, group)

    def all_gather(self, label, whole, bounds, group):
        position, count = group.index(self.rank), len(group)
        for hop in range(count - 1):
            own_chunk, peer_chunk = (position - hop) % count, (position - hop - 1) % count
            self.send(group[(position + 1) % count], label, [whole[bounds[own_chunk] : bounds[own_chunk + 1]]])
            (received,) = self.fabric.recv(group[position - 1], label)
            whole[bounds[peer_chunk] : bounds[peer_chunk + 1]] = received
        return CompletedWork()


def count_bytes(plan, num_steps, optimizer=ADAMW):
    """Return the mean bytes sent per rank, and those of the plan's formula."""
    with build_local_ranks(plan, model=chain(4), optimizer=optimizer, share_params_on_host=False) as local_ranks:
        for rank in local_ranks.ranks.values():
            rank.interpreter.communication.fabric = RingFabric(rank.interpreter.fabric)
        for number in range(num_steps):
            local_ranks.step(number, make_batch(N))
        sent = [rank.interpreter.communication.fabric.sent for rank in local_ranks.ranks.values()]
        return Fraction(sum(sent), N), num_steps * local_ranks.compiled.sent_bytes()[0]


@pytest.mark.parametrize("option", CLOSED)
def test_a_step_sends_the_bytes_of_the_closed_formula(option):
    sent, expected = count_bytes(f"data({N}, {option})" if option else f"data({N})", num_steps=1)
    assert sent == expected == CLOSED[option]


def test_momenta_in_one_bit_have_the_bytes_of_signs_and_scales():
    """The first step sends gradients; the formula is that of all later ones."""
    optimizer = partial(OneBitAdam, lr=1e-2, freeze_step=1)
    (first, _), (both, formula) = (
        count_bytes(f"data({N}, compress=onebit, compress_from=1)", num_steps, optimizer) for num_steps in (1, 2)
    )
    assert first == CLOSED[""]
    assert both - first == formula / 2 == SUM * weight(lambda *s: math.ceil(math.prod(s) / 8) + 8)


def in_bits(bits):
    return weight(lambda *shape: math.ceil(math.prod(shape) * bits / 8) + 8)


@pytest.mark.parametrize(
    ("option", "shards"),
    [
        ("quantized_weights=int8", 2 * in_bits(8) + in_bits(64) - 8 * len(SHAPES)),
        ("quantized_gradients=int4", 2 * (in_bits(64) - 8 * len(SHAPES)) + in_bits(4)),
        ("quantized_weights=int4, quantized_gradients=int8", 2 * in_bits(4) + in_bits(8)),
    ],
)
def test_quantized_shards_have_the_bytes_of_codes_and_scales(option, shards):
    """Weights are gathered twice, gradients reduced once."""
    sent, expected = count_bytes(f"zero({N}, level=3, {option})", num_steps=1)
    assert sent == expected == Fraction(N - 1, N) * shards


def test_eight_steps_with_one_synchronization_send_one_all_reduce():
    sent, expected = count_bytes(f"data({N}, sync_every=8)", num_steps=8)
    assert sent == expected == CLOSED[""]
