"""What goes wrong in a simulated world, and how often; drawn from the seed: each is another kind of day."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the world is, until it gets better.

    Args:
        loss: of a message, as a probability.
        twice: of a message that arrives twice.
        slow: of a message that takes seconds, and is overtaken.
        crash_every_s: between two crashes, on average; 0 for none.
        pause_every_s: between two pauses of a member, on average.
        cut_every_s: between two broken links, on average.
        torn: of a write that its machine does not survive.
        stop_s: from then on nothing goes wrong any more.
    """

    loss: float = 0.0
    twice: float = 0.0
    slow: float = 0.0
    crash_every_s: float = 0.0
    pause_every_s: float = 0.0
    cut_every_s: float = 0.0
    torn: float = 0.0
    stop_s: float = 0.0


def draw(random: Random) -> Faults:
    """Return the faults of one seed."""

    def often(most: float) -> float:
        return random.choice((0.0, random.random() * most))

    def every(least_s: float) -> float:
        return random.choice((0.0, least_s * (1 + 3 * random.random())))

    slow, stop_s = often(0.2), 10 + 20 * random.random()
    return Faults(often(0.3), often(0.5), slow, every(2.0), every(4.0), every(4.0), often(0.1), stop_s)
