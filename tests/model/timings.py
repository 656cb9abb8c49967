"""Timings made by hand, for models of equal layers."""

from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Fixed, Machine, PieceTime, Point, Timing, known_pieces, known_weights

NO_CALLS = Fixed()


def took(forward_s, backward_s=0.0, kept_bytes=0.0):
    """What a piece took; a third of its backward is the part for inputs."""
    return PieceTime(forward_s, backward_s, backward_s / 4, 3 * backward_s / 4, 0.0, kept_bytes)


def timing_of(model: ModelSpec, pieces, *, samples=1, whole=None, fixed=NO_CALLS, **per_byte) -> Timing:
    """The timing of a model whose pieces took so long for so many samples; the whole as long as all of them."""
    total = whole or took(sum(one.forward_s for one in pieces), sum(one.backward_s for one in pieces))
    point = Point(samples, tuple(pieces), total)
    machine = Machine("a core", 1, "SGD")
    return Timing("Chain", known_pieces(model), known_weights(model), machine, (point,), fixed=fixed, **per_byte)
