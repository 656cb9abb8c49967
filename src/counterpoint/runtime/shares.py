"""Which part of a microbatch's mean loss is in the loss that its gradients are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from counterpoint.runtime.calls import Script


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of one step.

    Args:
        weights: for each microbatch its part in the mean over the samples that are decided on together.
        ratios: for a microbatch and a rank that its gradient comes from and that decides on others together with it,
            what makes its part there its part here; left out where that is 1.
    """

    weights: Mapping[int, float]
    ratios: Mapping[tuple[int, int], float] = field(default_factory=dict)


def shares_of(script: Script, number: int, sizes: Mapping[int, int]) -> Shares:
    """Return the parts in a step of a rank.

    Args:
        script: what the rank does.
        number: of the step.
        sizes: samples of every microbatch.
    """
    first = number * script.stride
    weights: dict[int, float] = {}
    totals: dict[int, int] = {}
    for domain in script.domains:
        total = _total(domain, first, sizes)
        for micro in domain:
            totals[micro] = total
            weights[micro + first] = sizes[micro + first] / max(total, 1)
    ratios = {
        (micro + first, peer): _total(theirs, first, sizes) / max(totals[micro], 1)
        for (micro, peer), theirs in script.above.items()
    }
    return Shares(weights, {place: ratio for place, ratio in ratios.items() if ratio != 1.0})


def _total(domain: Sequence[int], first: int, sizes: Mapping[int, int]) -> int:
    return sum(sizes[micro + first] for micro in domain)


def domain_of(script: Script, number: int, decided: int) -> frozenset[int]:
    """Return the microbatches that a commit decides on, the first, second and so on of a step."""
    return frozenset(micro + number * script.stride for micro in script.domains[decided])
