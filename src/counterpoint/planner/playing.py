"""A compiled plan on the simulator's clock: what its words cost, how long its steps take, and what they look like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from counterpoint.compiler.compile import Compiled, sizes_in
from counterpoint.model.spec import ModelSpec
from counterpoint.model.timing import Timing
from counterpoint.program.instruction import Backward
from counterpoint.program.text import format_instruction
from counterpoint.program.trace import Trace
from counterpoint.program.turn import Turn
from counterpoint.simulator.costs import Costs, model_costs
from counterpoint.simulator.portions import Portion, portions_of, spread
from counterpoint.simulator.simulate import simulate_turn
from counterpoint.simulator.spent import Spent, spend
from counterpoint.simulator.timed import timed_costs
from counterpoint.strategies.buckets import Buckets
from counterpoint.world.cluster import Cluster


def costs_on(
    clusters: Sequence[Cluster], model: ModelSpec, *, samples: int, num_micros: int, timing: Timing | None = None
) -> list[Costs]:
    """Return what the words of a program cost on each cluster.

    Args:
        clusters: where it runs.
        model: with the blocks that the program names.
        samples: of one microbatch.
        num_micros: microbatches of a step, of all ranks.
        timing: of the model's own pieces; None where their work is only counted.
    """
    sizes = sizes_in(model, samples)
    counted = [model_costs(model, one, sizes, samples_per_micro=samples) for one in clusters]
    if timing is None:
        return counted
    return [timed_costs(model, timing, one, sizes, samples_per_micro=samples, num_micros=num_micros) for one in counted]


@dataclass(frozen=True, slots=True)
class Playing:
    """A compiled plan that is to be played.

    Args:
        compiled: the plan's program.
        samples: of one microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """

    compiled: Compiled
    samples: int
    timing: Timing | None = None

    def spend(self, clusters: Sequence[Cluster]) -> list[Spent]:
        """Return for each cluster what a step takes; where steps are not all alike, over all of them in the long run.

        Ranks are on hosts, and in each other's way, as on the first one.
        """
        costs = self._costs(clusters)
        played = []
        for turn in self.compiled.turns:
            if turn.share:
                shown, costing, _ = self._as_it_runs(turn, costs, clusters[0])
                played.append((float(turn.share), spend(shown, costing, clusters[0])))
        return [_mean([(share, found[at]) for share, found in played]) for at in range(len(clusters))]

    def show(self, cluster: Cluster) -> Trace:
        """Return a step word by word; of steps that are not all alike the last kind."""
        turn = self.compiled.turns[-1]
        shown, (costing,), origins = self._as_it_runs(turn, self._costs((cluster,)), cluster)
        trace = simulate_turn(shown, costing, cluster)
        if not origins:
            return trace
        events = []
        for event in trace.events:
            index = origins[event.rank][event.index]
            text = format_instruction(turn.program.rows[event.rank].body[index])
            events.append(replace(event, index=index, words=text))
        return replace(trace, events=tuple(events))

    def _costs(self, clusters: Sequence[Cluster]) -> list[Costs]:
        model, micros = self.compiled.model, self.compiled.plan.num_micros
        return costs_on(clusters, model, samples=self.samples, num_micros=micros, timing=self.timing)

    def _as_it_runs(
        self, turn: Turn, costs: Sequence[Costs], cluster: Cluster
    ) -> tuple[Turn, list[Costs], tuple[tuple[int, ...], ...]]:
        """Return a kind of step as it is played, its costs, and where its words come from if it was made finer."""
        model = self.compiled.model
        if not is_divisible(model):
            return turn, list(costs), ()
        portions = backward_portions(model, costs[0], self.compiled.plan.buckets, self.samples, self.timing)
        finer = spread(turn, portions, cluster)
        if finer is None:
            return turn, list(costs), ()
        return finer.turn, [finer.costs(one) for one in costs], finer.origins


def is_divisible(model: ModelSpec) -> bool:
    """Tell whether the backward of a model is one word for several pieces, so that sums may begin inside of it."""
    return model.num_blocks == 1 and len(model.pieces) > 1


def backward_portions(
    model: ModelSpec, costs: Costs, buckets: Buckets, samples: int, timing: Timing | None
) -> tuple[Portion, ...]:
    """Return the portions of the backward of a model in one block, by what its pieces take or, untimed, cost.

    Args:
        model: in one block.
        costs: of its words.
        buckets: of its sums.
        samples: of one microbatch.
        timing: of the model's own pieces; None where their work is only counted.
    """
    whole_s = costs.compute_s(Backward(0, 0), Fraction(1))
    if timing is None:
        work = [piece.cost for piece in model.pieces]
    else:
        work = [piece.backward_s for piece in timing.at(samples).pieces]
    total = sum(work)
    return portions_of(model, [whole_s * one / total for one in work] if total else work, buckets)


def _mean(parts: Sequence[tuple[float, Spent]]) -> Spent:
    return Spent(
        sum(share * spent.step_s for share, spent in parts),
        sum(share * spent.compute_s for share, spent in parts),
        sum(share * spent.update_s for share, spent in parts),
    )
