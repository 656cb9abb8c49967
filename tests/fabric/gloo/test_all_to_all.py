"""Which member sends to which in each round of an all-to-all."""

from typing import Any, cast

import torch

from counterpoint.fabric.gloo.ops import CHUNK_BYTES, ScratchLease, ScratchPool, gloo_all_to_all

SIZE = 4


class Noting:
    """A connection that carries nothing, and notes what is given to it."""

    def __init__(self, own):
        self.own, self.noted = own, []

    def rank(self):
        return self.own

    def size(self):
        return SIZE

    def alltoall_base(self, _received, _sent, incoming, outgoing, _options):
        self.noted.append((incoming, outgoing))


def noted(rank, num_bytes):
    """Return how much comes and goes in each exchange of a member."""
    gloo, parts = Noting(rank), torch.zeros(2, SIZE, num_bytes, dtype=torch.uint8)
    gloo_all_to_all(cast("Any", gloo), list(parts[0]), list(parts[1]), num_bytes, ScratchLease(ScratchPool()))
    return gloo.noted


def test_large_ranges_go_to_one_member_at_a_time():
    exchanges = list(zip(*(noted(rank, CHUNK_BYTES + 1) for rank in range(SIZE)), strict=True))
    assert len(exchanges) == 2 * (SIZE - 1)
    for exchange in exchanges:
        given = torch.tensor([outgoing for _, outgoing in exchange])
        assert given.T.tolist() == [incoming for incoming, _ in exchange]
        assert (given > 0).sum(0).tolist() == (given > 0).sum(1).tolist() == [1] * SIZE


def test_every_other_member_gets_all_of_its_bytes():
    gone = torch.tensor([outgoing for _, outgoing in noted(2, CHUNK_BYTES + 1)]).sum(0)
    assert gone.tolist() == [CHUNK_BYTES + 1, CHUNK_BYTES + 1, 0, CHUNK_BYTES + 1]


def test_small_ranges_go_to_all_members_at_once():
    assert noted(1, 8) == [([8, 0, 8, 8], [8, 0, 8, 8])]
