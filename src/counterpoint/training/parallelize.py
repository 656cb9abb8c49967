"""For people with their own loop: one function that takes a global batch through a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from counterpoint.data.sampler import split_batch
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fingerprint import format_ranks
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import MicrobatchSource, SlicedBatch, slice_samples
from counterpoint.runtime.optimizer_spec import TorchOptimizerFactory
from counterpoint.runtime.step_commit import StepResult
from counterpoint.training.batches.global_batch import (
    batch_digest,
    committed_microbatches,
    count_samples,
    make_global_batch,
    require_same_batches,
    warn_forked_workers,
)
from counterpoint.training.batches.per_rank import PerRankBatchExchange, require_synchronous_steps
from counterpoint.training.distributed_world import DistributedWorld, has_remote_ranks, open_world, sibling_world
from counterpoint.training.local_ranks import LocalRanks, abort_training
from counterpoint.training.plan_resolution import (
    MAX_TRACE_SAMPLES,
    AutoStrategy,
    has_explicit_microbatches,
    make_auto_strategy,
    parse_options,
    resolve_initial_plan,
)
from counterpoint.training.plan_trials import TrialTarget, select_plan
from counterpoint.training.validation import min_microbatch_size, wrap_optimizer


class TrainStep:
    """A training step: called with a global batch, it returns the mean loss over it.

    Every rank passes the same batch and computes its own part of it, or passes a batch of its own where
    :func:`parallelize` was told so. Close it, or use it in a ``with`` block, when training is over; the model then has
    the trained weights. A step that ends with an error is left out where all ranks are in this process, and others may
    follow; a plan without a flush then drops what is under way.

    Under such a plan (pipedream) a call updates with the batch whose loss it returns, and the learning rate that counts
    is that of this call: step a schedule after calls that have returned a loss, and in ``flush(after=schedule.step)``.

    Args:
        team: the ranks.
        has_fixed_micros: whether the number of microbatches was given.
        auto: the choice of the plan, where it is left open until the first batch.
        own: the batches of the ranks, where each process passes its own.
    """

    def __init__(
        self,
        local_ranks: LocalRanks,
        *,
        has_fixed_microbatches: bool,
        auto_strategy: AutoStrategy | None = None,
        batch_exchange: PerRankBatchExchange | None = None,
    ) -> None:
        self.local_ranks = local_ranks
        self.auto_strategy = auto_strategy
        self.batch_exchange = batch_exchange
        self.number = 0
        self.has_fixed_microbatches = has_fixed_microbatches
        self.is_closed = False
        self.is_multi_process = False  # whether other processes bring batches, too
        self.committed_microbatches: list[int] = []
        self.known_pids: set[int] = set()  # the processes of this one that have been looked at
        self.has_warned_of_fork = False  # of one that was forked

    def __call__(self, inputs: Any, targets: Any) -> float:  # noqa: ANN401 - whatever model and loss take
        """Train on one global batch.

        Args:
            inputs: a tensor, or a tuple or dict of tensors, with the samples along dim 0.
            targets: likewise.

        Returns:
            The mean loss over the batch, that of all ranks together, before the update. Under a plan without a flush
            (pipedream), that of the batch that has come through all stages, some calls after its own one, and nan as
            long as there is none.

        Raises:
            PlanError: the step is closed.
            DataError: inputs and targets differ in length, ranks in the size of their batches; or the model's weights
                were changed in between, and the ranks train copies of them: see :meth:`import_weights`.
        """
        if self.is_closed:
            raise PlanError(
                f"step {self.number} comes after close(), which has ended the ranks; close when training is over, and "
                "to train on, call parallelize(...) again"
            )
        if self.batch_exchange is not None:
            return self.step_with_rank_batch(self.batch_exchange, (inputs, targets))
        count = count_samples(inputs, targets)
        if self.local_ranks.compiled is None:
            self.build(inputs, targets, count)
        return self.submit(make_global_batch((inputs, targets), count, self.local_ranks.global_num_microbatches))

    def submit(self, batch: MicrobatchSource) -> float:
        """Let a batch enter; return the loss of the one that has come through: of this one, unless batches overlap."""
        flight = self.local_ranks.in_flight
        flight.batches[self.number] = batch
        loss = self.run_step(self.number - flight.lookahead)
        self.number += 1
        return loss

    def run_step(self, number: int) -> float:
        """Take the step that ends with the batch of this number, on all ranks; return its loss, nan where none is."""
        if (self.is_multi_process or self.batch_exchange is not None) and not self.has_warned_of_fork:
            self.has_warned_of_fork = warn_forked_workers(
                self.known_pids
            )  # a loader starts workers anew in every epoch
        flight = self.local_ranks.in_flight
        with torch.random.fork_rng(devices=[], enabled=self.local_ranks.uses_rng):
            verdict = self.local_ranks.step(number, flight.batch_source(number))
        feed = flight.batches.pop(number, None)
        if self.is_multi_process and isinstance(feed, SlicedBatch):
            self.require_full_batch(number, verdict, feed)
        self.local_ranks.optimizer_spec.after_step()
        return verdict.loss

    def step_with_rank_batch(self, batch_exchange: PerRankBatchExchange, batch: tuple[Any, Any]) -> float:
        """Train on the batches of all ranks, this one's among them, and return their mean loss."""
        count, is_first = count_samples(*batch, may_be_empty=True), self.local_ranks.compiled is None
        offers = batch_exchange.exchange_info(self.number, count, digest=batch_digest(*batch) if is_first else "")
        if is_first:
            self.build_for_rank_batches(batch_exchange, batch, [offer.count for offer in offers])
        batch_exchange.check_batches(self.number, offers)
        return self.submit(batch_exchange.make_batch(batch, offers))

    def build_for_rank_batches(
        self, batch_exchange: PerRankBatchExchange, batch: tuple[Any, Any], counts: list[int]
    ) -> None:
        """Build the ranks for batches of their own.

        Raises:
            DataError: a rank has no sample to build the model with.
        """
        team = self.local_ranks
        if 0 in counts:
            raise DataError(
                f"{format_ranks([rank for rank, count in enumerate(counts) if not count])} brought no sample to the first "
                "step, by which every rank builds the model; give each one sample or more in its first batch"
            )
        total = max(counts) * (team.plan.global_num_microbatches // team.plan.num_microbatches)
        self.resolve_plan(slice_samples(batch[0], 0, min(*counts, MAX_TRACE_SAMPLES)), total)
        size = split_batch(total, team.plan.global_num_microbatches)[0][1]
        batch_exchange.set_program(
            team.build(slice_samples(batch[0], 0, min(*counts, size)), size).step_variants[-1].program
        )

    def finish(self) -> None:
        """Take part, without samples, in the steps of the ranks that have some left, until all have come here.

        To be called where a rank's loop over batches of its own ends, once in each epoch for instance;
        :meth:`export_weights`, :meth:`mean` and :meth:`close` do it by themselves. Where all ranks pass the same batches
        there is nothing to do.

        Raises:
            DataError: ranks may not have different numbers of batches.
        """
        while self.batch_exchange is not None and not self.is_closed:
            offers = self.batch_exchange.exchange_info(self.number, 0, is_done=True)
            if all(offer.is_done for offer in offers):
                return
            if self.local_ranks.compiled is None:
                self.build_for_rank_batches(self.batch_exchange, ((), ()), [offer.count for offer in offers])
            self.batch_exchange.check_batches(self.number, offers)
            self.submit(self.batch_exchange.make_batch(None, offers))

    def mean(self, value: float, count: int = 1) -> float:
        """Return the mean of a value over all ranks, each counting as often as it says; all ranks call it together.

        What each rank has measured on its own part of held-out data becomes one figure, however uneven the parts are.

        Args:
            value: this rank's mean; not looked at where ``count`` is 0.
            count: of how many samples.

        Returns:
            The mean over the samples of all ranks; nan where there are none.
        """
        self.finish()
        fabric = self.local_ranks.world.fabrics[0]
        pairs: list[Any] = [[value if count else 0.0, count]]
        if has_remote_ranks(self.local_ranks.world):
            pairs = list(fabric.gather_values("mean", pairs[0], tuple(range(fabric.num_ranks))))
        total = sum(number for _, number in pairs)
        return math.fsum(one * number for one, number in pairs) / total if total else math.nan

    def flush(self, after: Callable[[], object] | None = None) -> list[float]:
        """Finish the batches that are under way, and return their losses; none are under a plan that always flushes.

        Under pipedream and pipedream_2bw the next batches begin with the newest weights, as the first ones did.

        Args:
            after: called after each of these batches, ``schedule.step`` for instance; else all are updated with at the
                learning rate of now.
        """
        flight, losses = self.local_ranks.in_flight, []
        for number in range(self.number - flight.lookahead, self.number) if flight.batches else ():
            is_there = number in flight.batches
            loss = self.run_step(number)
            losses += [loss] if is_there else []
            if is_there and after is not None:
                after()
        return losses

    def build(self, inputs: Any, targets: Any, count: int) -> None:  # noqa: ANN401 - whatever the model takes
        """Build the ranks for batches of this size."""
        team = self.local_ranks
        fabric = team.world.fabrics[0]
        self.is_multi_process = has_remote_ranks(team.world)
        if self.is_multi_process:
            require_same_batches(fabric, count, batch_digest(inputs, targets))
        self.resolve_plan(slice_samples(inputs, 0, min(count, MAX_TRACE_SAMPLES)), count, (inputs, targets))
        start, stop = split_batch(count, team.plan.global_num_microbatches)[0]
        compiled = team.build(slice_samples(inputs, start, stop), stop - start)
        self.committed_microbatches = committed_microbatches(compiled.step_variants[-1].program, fabric.rank)

    def resolve_plan(self, sample_inputs: Any, count: int, batch: tuple[Any, Any] = ((), ())) -> None:  # noqa: ANN401
        """The plan is chosen, where that was left open, and has microbatches for so many samples, such as this batch.

        Raises:
            PlanError: there are none.
        """
        team = self.local_ranks
        if self.auto_strategy is not None:
            ranks = partial(sibling_world, team.world, team.options.timeout_s)
            feed = partial(make_global_batch, batch, count)
            subject = TrialTarget(team.model, team.loss, team.optimizer_spec, team.options, ranks, feed)
            team.plan, team.choice = select_plan(self.auto_strategy, subject, sample_inputs, count)
        elif not self.has_fixed_microbatches:
            team.plan = team.plan.with_microbatches_for(count, min_samples=min_microbatch_size(team.model))
        team.plan.require_batch(count)

    def require_full_batch(self, number: int, result: StepResult, batch: SlicedBatch) -> None:
        """Check that the ranks that commit together have trained on as many samples as this rank's batch has.

        Raises:
            DataError: some had another batch.
        """
        expected = sum(batch.sizes[micro] for micro in self.committed_microbatches)
        if expected and result.num_samples not in {0, expected}:
            raise DataError(
                f"rank {self.local_ranks.world.fabrics[0].rank} counts {expected} samples in step {number}, but the "
                f"ranks together {result.num_samples}, so they were given different batches, and the step was not the "
                "one that was meant; every rank passes the same global batch and takes its own part of it"
            )

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.local_ranks.optimizer_spec.optimizer

    def export_weights(self) -> nn.Module:
        """Put the trained weights into the model, on every rank, and return it; what is under way is finished first.

        The losses of that are not told, as those in ``take()`` and ``close()`` are not; ``flush()`` tells them.
        """
        self.finish()
        self.flush()
        self.local_ranks.export_weights()
        return self.local_ranks.model

    def import_weights(self) -> None:
        """Bring the model's weights, changed since :meth:`export_weights`, to all ranks; every rank changes its own alike.

        Without it a step refuses weights that were changed where ranks train copies of them. Changes through
        ``.data`` are not seen: torch does not count them.
        """
        if self.local_ranks.compiled is not None:
            self.flush()
            self.local_ranks.import_weights()

    def close(self) -> None:
        """Give the weights back and end the connection to the other ranks; a second call does nothing."""
        if self.is_closed:
            return
        try:
            self.export_weights()
        finally:
            self.is_closed = True
            self.local_ranks.close()

    def __enter__(self) -> TrainStep:
        """Use the step in a ``with`` block, which closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            if not self.is_closed and not isinstance(self.local_ranks.world, DistributedWorld):
                abort_training(self.local_ranks, error, "the first step")
        finally:
            self.is_closed = True
            self.local_ranks.released_params.poison(error)
            self.local_ranks.close()


def parallelize(  # noqa: PLR0913 - the options of a run, most by keyword
    model: nn.Module,
    optimizer: optim.Optimizer | TorchOptimizerFactory,
    loss: Callable[[Any, Any], Tensor],
    *,
    strategy: str | Plan = "data",
    num_microbatches: int | None = None,
    passes: Sequence[str] | None = None,
    batches: Literal["global", "per_rank"] = "global",
    uneven: bool | None = None,
    environment: RankEnvironment | None = None,
    **options: Any,  # noqa: ANN401 - checked by Options
) -> TrainStep:
    """Return a step that trains the model under any strategy, for a loop of one's own.

    Args:
        model: any module.
        optimizer: a torch optimizer on its parameters, or a factory.
        loss: from the model's output and the targets to the mean loss.
        strategy: a plan or its text, as for :class:`counterpoint.training.trainer.SimulatedWorker`.
        num_microbatches: microbatches of the innermost program.
        passes: what is done to the program afterwards, as for the trainer.
        batches: ``same`` where every process passes the whole global batch, ``own`` where each passes samples of its
            own, as a ``DistributedSampler`` gives them; the gradient is then that of all samples together, each
            counting alike. One process with all ranks passes the whole batch in either case.
        uneven: whether processes with batches of their own may have different numbers of samples, or of batches
            (:meth:`Step.finish`): True, or False for an error; by default it is said once.
        environment: what a launcher told this process; detected when left out.
        **options: fields of :class:`counterpoint.training.options.Options`.

    Example:
        >>> import torch, counterpoint as cp
        >>> model = torch.nn.Linear(2, 1)
        >>> step = cp.parallelize(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss, strategy="zero3(2)"
        ... )
        >>> with step:
        ...     losses = [step(torch.ones(4, 2), torch.zeros(4, 1)) for _ in range(3)]
        >>> losses[0] > losses[2]
        True
    """
    if batches not in {"global", "per_rank"} or (batches == "global" and uneven is not None):
        given = f"batches={batches!r}" + (f" with uneven={uneven}" if uneven is not None else "")
        raise PlanError(
            f"{given} makes no sense; batches is 'global' or 'per_rank', and uneven is about the batches of batches='per_rank'"
        )
    chosen = parse_options(options)
    found = environment if environment is not None else detect()
    plan = resolve_initial_plan(strategy, found, num_microbatches, passes)
    face = wrap_optimizer(optimizer, model, strategy)
    world = open_world(found, plan.num_ranks, chosen.timeout_s)
    team = LocalRanks(world, plan, model, loss, face, chosen)
    fixed = has_explicit_microbatches(strategy, num_microbatches)
    own = None
    if batches == "per_rank" and has_remote_ranks(world):
        require_synchronous_steps(plan, chosen.num_measured_plans)
        own = PerRankBatchExchange(world.fabrics[0], face, uneven=uneven)
    return TrainStep(
        team,
        has_fixed_microbatches=fixed,
        auto_strategy=make_auto_strategy(strategy, plan, num_microbatches, chosen),
        batch_exchange=own,
    )
