"""Report the steps of a custom training loop to a run folder."""

from __future__ import annotations

from time import perf_counter

from counterpoint.runtime.commit.device_commit import LateResult
from counterpoint.runtime.commit.step_commit import StepResult
from counterpoint.training.callbacks.callback import RunEnd, RunStart
from counterpoint.training.callbacks.run_folder import RunFolder
from counterpoint.training.callbacks.step_reporter import TRACED_STEP, StepReporter
from counterpoint.training.distributed_world import has_remote_ranks
from counterpoint.training.ranks.local_ranks import LocalRanks
from counterpoint.training.ranks.step_trace import trace_step


class LoopReporter:
    """Takes the steps of a loop and reports each.

    Args:
        local_ranks: those that take them.
        run_folder: written by the first rank.
    """

    def __init__(self, local_ranks: LocalRanks, run_folder: RunFolder) -> None:
        self.local_ranks = local_ranks
        fabric = local_ranks.world.fabrics[0]
        self.callbacks = [run_folder] if fabric.rank == 0 else []
        self.reporter = StepReporter(self.callbacks, fabric.num_ranks if has_remote_ranks(local_ranks.world) else 1)
        self.num_steps = 0
        self.last_s = perf_counter()

    def take_step(self, number: int) -> StepResult | LateResult:
        """Take the step that finishes a batch, and report it unless there is no such batch yet."""
        ranks = self.local_ranks
        assert ranks.compiled is not None, "built"
        batches = ranks.in_flight.batches
        if not self.num_steps:
            size = sum(next(iter(batches.values())).sizes.values())
            for callback in self.callbacks:
                callback.on_start(RunStart(ranks.compiled, 0, None, size, ranks.choice))
            self.num_steps = 1
        source, trace = ranks.in_flight.batch_source(number), None
        if number == TRACED_STEP or self.reporter.is_trace_due:
            result, trace = trace_step(ranks, number, source)
        else:
            result = ranks.step(number, source)
        started_s, self.last_s = self.last_s, perf_counter()
        if number in batches:
            self.num_steps = number + 1
            self.reporter.report(
                number,
                result,
                epoch=0,
                num_samples=result.num_samples,
                seconds=self.last_s - started_s,
                options=ranks.optimizer_spec.options(0),
                trace=trace,
            )
        return result

    def end(self, error: BaseException | None) -> None:
        """Report the end of the loop."""
        self.reporter.end(error)
        for callback in self.callbacks:
            callback.on_end(RunEnd(self.num_steps, error))
