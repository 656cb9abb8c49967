"""For people with their own loop: one function that takes a global batch through a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn, optim

from counterpoint.data.sampler import split
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fingerprint import ranks
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.plan import Plan
from counterpoint.runtime.feed import BatchFeed, Feed, cut
from counterpoint.runtime.optimizers import Factory
from counterpoint.runtime.vote import Verdict
from counterpoint.training.batches import count_samples, digest, require_same_batches, warn_of_forks, whole_batch
from counterpoint.training.checks import make_face
from counterpoint.training.choice import FEW_SAMPLES, Auto, make_auto, make_options, make_plan, says_microbatches
from counterpoint.training.failing import leave
from counterpoint.training.feeds import counted_micros
from counterpoint.training.norms import least_samples
from counterpoint.training.own_batches import OwnBatches, require_whole_steps
from counterpoint.training.team import Team
from counterpoint.training.trials import Subject, settle
from counterpoint.training.world import JoinedWorld, another, is_one_of_many, open_world


class Step:
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
        self, team: Team, *, has_fixed_micros: bool, auto: Auto | None = None, own: OwnBatches | None = None
    ) -> None:
        self.team = team
        self.auto = auto
        self.own = own
        self.number = 0
        self.has_fixed_micros = has_fixed_micros
        self.is_closed = False
        self.is_shared = False  # whether other processes bring batches, too
        self.counted: list[int] = []
        self.children: set[int] = set()  # the processes of this one that have been looked at
        self.has_warned = False  # of one that was forked

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
                were changed in between, and the ranks train copies of them: see :meth:`take`.
        """
        if self.is_closed:
            raise PlanError(
                f"step {self.number} comes after close(), which has ended the ranks; close when training is over, and "
                "to train on, call parallelize(...) again"
            )
        if self.own is not None:
            return self.take_part(self.own, (inputs, targets))
        count = count_samples(inputs, targets)
        if self.team.compiled is None:
            self.build(inputs, targets, count)
        return self.enter(whole_batch((inputs, targets), count, self.team.num_micros))

    def enter(self, feed: Feed) -> float:
        """Let a batch enter; return the loss of the one that has come through: of this one, unless batches overlap."""
        flight = self.team.flight
        flight.feeds[self.number] = feed
        loss = self.advance(self.number - flight.ahead)
        self.number += 1
        return loss

    def advance(self, number: int) -> float:
        """Take the step that ends with the batch of this number, on all ranks; return its loss, nan where none is."""
        if (self.is_shared or self.own is not None) and not self.has_warned:
            self.has_warned = warn_of_forks(self.children)  # a loader starts workers anew in every epoch
        flight = self.team.flight
        with torch.random.fork_rng(devices=[], enabled=self.team.draws):
            verdict = self.team.step(number, flight.feed(number))
        feed = flight.feeds.pop(number, None)
        if self.is_shared and isinstance(feed, BatchFeed):
            self.require_all(number, verdict, feed)
        self.team.face.stepped()
        return verdict.loss

    def take_part(self, own: OwnBatches, batch: tuple[Any, Any]) -> float:
        """Train on the batches of all ranks, this one's among them, and return their mean loss."""
        count, is_first = count_samples(*batch, may_be_empty=True), self.team.compiled is None
        offers = own.meet(self.number, count, content=digest(*batch) if is_first else "")
        if is_first:
            self.build_for_all(own, batch, [offer.count for offer in offers])
        own.judge(self.number, offers)
        return self.enter(own.feed(batch, offers))

    def build_for_all(self, own: OwnBatches, batch: tuple[Any, Any], counts: list[int]) -> None:
        """Build the ranks for batches of their own.

        Raises:
            DataError: a rank has no sample to build the model with.
        """
        team = self.team
        if 0 in counts:
            raise DataError(
                f"{ranks([rank for rank, count in enumerate(counts) if not count])} brought no sample to the first "
                "step, by which every rank builds the model; give each one sample or more in its first batch"
            )
        total = max(counts) * (team.plan.num_micros // team.plan.num_microbatches)
        self.settle_plan(cut(batch[0], 0, min(*counts, FEW_SAMPLES)), total)
        size = split(total, team.plan.num_micros)[0][1]
        own.open(team.build(cut(batch[0], 0, min(*counts, size)), size).turns[-1].program)

    def finish(self) -> None:
        """Take part, without samples, in the steps of the ranks that have some left, until all have come here.

        To be called where a rank's loop over batches of its own ends, once in each epoch for instance;
        :meth:`give_back`, :meth:`mean` and :meth:`close` do it by themselves. Where all ranks pass the same batches
        there is nothing to do.

        Raises:
            DataError: ranks may not have different numbers of batches.
        """
        while self.own is not None and not self.is_closed:
            offers = self.own.meet(self.number, 0, is_done=True)
            if all(offer.is_done for offer in offers):
                return
            if self.team.compiled is None:
                self.build_for_all(self.own, ((), ()), [offer.count for offer in offers])
            self.own.judge(self.number, offers)
            self.enter(self.own.feed(None, offers))

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
        fabric = self.team.world.fabrics[0]
        pairs: list[Any] = [[value if count else 0.0, count]]
        if is_one_of_many(self.team.world):
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
        flight, losses = self.team.flight, []
        for number in range(self.number - flight.ahead, self.number) if flight.feeds else ():
            is_there = number in flight.feeds
            loss = self.advance(number)
            losses += [loss] if is_there else []
            if is_there and after is not None:
                after()
        return losses

    def build(self, inputs: Any, targets: Any, count: int) -> None:  # noqa: ANN401 - whatever the model takes
        """Build the ranks for batches of this size."""
        team = self.team
        fabric = team.world.fabrics[0]
        self.is_shared = is_one_of_many(team.world)
        if self.is_shared:
            require_same_batches(fabric, count, digest(inputs, targets))
        self.settle_plan(cut(inputs, 0, min(count, FEW_SAMPLES)), count, (inputs, targets))
        start, stop = split(count, team.plan.num_micros)[0]
        compiled = team.build(cut(inputs, start, stop), stop - start)
        self.counted = counted_micros(compiled.turns[-1].program, fabric.rank)

    def settle_plan(self, few: Any, count: int, batch: tuple[Any, Any] = ((), ())) -> None:  # noqa: ANN401
        """The plan is chosen, where that was left open, and has microbatches for so many samples, such as this batch.

        Raises:
            PlanError: there are none.
        """
        team = self.team
        if self.auto is not None:
            ranks = partial(another, team.world, team.options.deadline_s)
            feed = partial(whole_batch, batch, count)
            subject = Subject(team.model, team.loss, team.face, team.options, ranks, feed)
            team.plan, team.choice = settle(self.auto, subject, few, count)
        elif not self.has_fixed_micros:
            team.plan = team.plan.with_microbatches_for(count, least=least_samples(team.model))
        team.plan.require_batch(count)

    def require_all(self, number: int, verdict: Verdict, feed: BatchFeed) -> None:
        """Check that the ranks that commit together have trained on as many samples as this rank's batch has.

        Raises:
            DataError: some had another batch.
        """
        expected = sum(feed.sizes[micro] for micro in self.counted)
        if expected and verdict.num_samples not in {0, expected}:
            raise DataError(
                f"rank {self.team.world.fabrics[0].rank} counts {expected} samples in step {number}, but the "
                f"ranks together {verdict.num_samples}, so they were given different batches, and the step was not the "
                "one that was meant; every rank passes the same global batch and takes its own part of it"
            )

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.team.face.optimizer

    def give_back(self) -> nn.Module:
        """Put the trained weights into the model, on every rank, and return it; what is under way is finished first.

        The losses of that are not told, as those in ``take()`` and ``close()`` are not; ``flush()`` tells them.
        """
        self.finish()
        self.flush()
        self.team.give_back()
        return self.team.model

    def take(self) -> None:
        """Bring the model's weights, changed since :meth:`give_back`, to all ranks; every rank changes its own alike.

        Without it a step refuses weights that were changed where ranks train copies of them. Changes through
        ``.data`` are not seen: torch does not count them.
        """
        if self.team.compiled is not None:
            self.flush()
            self.team.take()

    def close(self) -> None:
        """Give the weights back and end the connection to the other ranks; a second call does nothing."""
        if self.is_closed:
            return
        try:
            self.give_back()
        finally:
            self.is_closed = True
            self.team.close()

    def __enter__(self) -> Step:
        """Use the step in a ``with`` block, which closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None:
            self.close()
            return
        try:
            if not self.is_closed and not isinstance(self.team.world, JoinedWorld):
                leave(self.team, error, "the first step")
        finally:
            self.is_closed = True
            self.team.elsewhere.lose(error)
            self.team.close()


def parallelize(  # noqa: PLR0913 - the options of a run, most by keyword
    model: nn.Module,
    optimizer: optim.Optimizer | Factory,
    loss: Callable[[Any, Any], Tensor],
    *,
    strategy: str | Plan = "data",
    num_microbatches: int | None = None,
    passes: Sequence[str] | None = None,
    batches: Literal["same", "own"] = "same",
    uneven: bool | None = None,
    environment: RankEnvironment | None = None,
    **options: Any,  # noqa: ANN401 - checked by Options
) -> Step:
    """Return a step that trains the model under any strategy, for a loop of one's own.

    Args:
        model: any module.
        optimizer: a torch optimizer on its parameters, or a factory.
        loss: from the model's output and the targets to the mean loss.
        strategy: a plan or its text, as for :class:`counterpoint.training.trainer.Trainer`.
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
    if batches not in {"same", "own"} or (batches == "same" and uneven is not None):
        given = f"batches={batches!r}" + (f" with uneven={uneven}" if uneven is not None else "")
        raise PlanError(
            f"{given} makes no sense; batches is 'same' or 'own', and uneven is about the batches of batches='own'"
        )
    chosen = make_options(options)
    found = environment if environment is not None else detect()
    plan = make_plan(strategy, found, num_microbatches, passes)
    face = make_face(optimizer, model, strategy)
    world = open_world(found, plan.num_ranks, chosen.deadline_s)
    team = Team(world, plan, model, loss, face, chosen)
    fixed = says_microbatches(strategy, num_microbatches)
    own = None
    if batches == "own" and is_one_of_many(world):
        require_whole_steps(plan, chosen.measure)
        own = OwnBatches(world.fabrics[0], face, uneven=uneven)
    return Step(team, has_fixed_micros=fixed, auto=make_auto(strategy, plan, num_microbatches, chosen), own=own)
