"""A model that was timed as PipeDream's optimizer reads it: layers with their figures."""

from __future__ import annotations

from counterpoint.model.timing import Timing
from counterpoint.planner.profile import Layer, Profile, chain_profile


def profile_of(timing: Timing, samples: int) -> Profile:
    """Return the pieces of a timed model as layers, each of which reads the one before it.

    Args:
        timing: of the model.
        samples: of the minibatch that the figures are for.

    Example:
        >>> from counterpoint.model.timing import Known, Machine, PieceTime, Point
        >>> took = PieceTime(1e-3, 2e-3, 1e-3, 1e-3, output_bytes=8.0)
        >>> timing = Timing(
        ...     "Linear", (Known("0", 16, 8.0, 4),), (("0.weight", 16),), Machine("a core"), (Point(2, (took,), took),)
        ... )
        >>> profile_of(timing, 2).layers[0].activation_bytes
        8.0
    """
    pieces = zip(timing.pieces, timing.at(samples).pieces, strict=True)
    return chain_profile(
        Layer(f"node{index}", known.name, took.forward_s, took.backward_s, took.output_bytes, known.weight_bytes)
        for index, (known, took) in enumerate(pieces, start=1)
    )
