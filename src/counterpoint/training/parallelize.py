"""For people with their own loop: one function that takes a global batch through a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from counterpoint.data.sampler import split
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.plan import Plan
from counterpoint.program.instruction import Commit, Forward
from counterpoint.program.program import Program
from counterpoint.runtime.feed import BatchFeed, Feed, cut
from counterpoint.runtime.optimizers import Factory
from counterpoint.runtime.vote import Verdict
from counterpoint.training.batches import count_samples, digest, warn_of_forks
from counterpoint.training.checks import make_face
from counterpoint.training.choice import FEW_SAMPLES, Auto, make_auto, make_options, make_plan
from counterpoint.training.team import Team
from counterpoint.training.world import open_world


class Step:
    """A training step: called with a global batch, it returns the mean loss over it.

    Every rank passes the same batch and computes its own part of it. Close it, or use it in a ``with`` block,
    when training is over; the model then has the trained weights.

    Args:
        team: the ranks.
        has_fixed_micros: whether the number of microbatches was given.
        auto: the choice of the plan, where it is left open until the first batch.
    """

    def __init__(self, team: Team, *, has_fixed_micros: bool, auto: Auto | None = None) -> None:
        self.team = team
        self.auto = auto
        self.number = 0
        self.has_fixed_micros = has_fixed_micros
        self.is_closed = False
        self.is_shared = False  # whether other processes bring batches, too
        self.counted: list[int] = []

    def __call__(self, inputs: Any, targets: Any) -> float:  # noqa: ANN401 - whatever model and loss take
        """Train on one global batch.

        Args:
            inputs: a tensor, or a tuple or dict of tensors, with the samples along dim 0.
            targets: likewise.

        Returns:
            The mean loss over the batch, before the update. Under a plan without a flush (pipedream), that of the batch
            that has come through all stages, some calls after its own one, and nan as long as there is none.

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
        count = count_samples(inputs, targets)
        if self.team.compiled is None:
            self.build(inputs, targets, count)
        flight = self.team.flight
        flight.feeds[self.number] = BatchFeed((inputs, targets), tuple(split(count, self.team.num_micros)))
        self.number += 1
        return self.finish(self.number - 1 - flight.ahead)

    def finish(self, number: int) -> float:
        """Take the step that finishes the batch of this number; return its loss, nan where there is no such batch."""
        flight = self.team.flight
        with torch.random.fork_rng(devices=[], enabled=self.team.draws):
            verdict = self.team.step(number, flight.feed(number))
        feed = flight.feeds.pop(number, None)
        if self.is_shared and feed is not None:
            self.require_all(number, verdict, feed)
        self.team.face.stepped()
        return verdict.loss

    def flush(self) -> list[float]:
        """Finish the batches that are under way, and return their losses; none are under a plan that always flushes.

        Under pipedream and pipedream_2bw the next batches begin with the newest weights, as the first ones did.
        """
        flight, losses = self.team.flight, []
        for number in range(self.number - flight.ahead, self.number) if flight.feeds else ():
            is_there = number in flight.feeds
            loss = self.finish(number)
            losses += [loss] if is_there else []
        return losses

    def build(self, inputs: Any, targets: Any, count: int) -> None:  # noqa: ANN401 - whatever the model takes
        """Build the ranks for batches of this size."""
        team = self.team
        fabric = team.world.fabrics[0]
        self.is_shared = len(team.world.fabrics) < fabric.num_ranks
        if self.is_shared:
            require_same_batches(fabric, count, digest(inputs, targets))
            warn_of_forks()
        if self.auto is not None:
            few = cut(inputs, 0, min(count, FEW_SAMPLES))
            team.plan = self.auto.choose(team.model, team.face, few, team.options, count)
        elif not self.has_fixed_micros:
            team.plan = team.plan.with_microbatches_for(count)
        team.plan.require_batch(count)
        start, stop = split(count, team.plan.num_micros)[0]
        compiled = team.build(cut(inputs, start, stop), stop - start)
        self.counted = counted_micros(compiled.turns[-1].program, fabric.rank)

    def require_all(self, number: int, verdict: Verdict, feed: Feed) -> None:
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
        """Put the trained weights into the model, on every rank, and return it; what is under way is finished first."""
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
        if not self.is_closed:
            self.is_closed = True
            self.flush()
            self.team.give_back()
            self.team.close()

    def __enter__(self) -> Step:
        """Use the step in a ``with`` block, which closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.is_closed = True
            self.team.close()


def require_same_batches(fabric: Fabric, count: int, content: str) -> None:
    """Check that all ranks begin with the same batch; all ranks call it together.

    Args:
        fabric: the way to the others.
        count: samples of this rank's batch.
        content: what :func:`counterpoint.training.batches.digest` says of it.

    Raises:
        DataError: they do not.
    """
    for rank, theirs in enumerate(fabric.gather_values("batch", [count, content], tuple(range(fabric.num_ranks)))):
        assert isinstance(theirs, list), "what every rank sends"
        if theirs[0] != count:
            raise DataError(
                f"rank {fabric.rank} was given a batch of {count} samples, rank {rank} one of {theirs[0]}; every rank "
                "passes the same global batch and takes its own part of it: leave the sharding of batches away"
            )
        if theirs[1] != content:
            raise DataError(
                f"rank {fabric.rank} and rank {rank} were given different batches of {count} samples; every rank "
                "passes the same global batch and takes its own part of it: leave a DistributedSampler away, shuffle "
                "with the same seed on every rank, and draw no noise that differs"
            )


def counted_micros(program: Program, rank: int) -> list[int]:
    """Return the microbatches whose samples the ranks that commit with this one count, each as often as it is."""
    words = program.rows[rank].body
    group = next((word.group for word in words if isinstance(word, Commit)), ())
    bodies = [word for member in group for word in program.rows[member].body if isinstance(word, Forward)]
    last = max((word.block for _, word in program.words() if isinstance(word, Forward)), default=0)
    return [word.micro for word in bodies if word.block == last]


def parallelize(  # noqa: PLR0913 - the options of a run, most by keyword
    model: nn.Module,
    optimizer: optim.Optimizer | Factory,
    loss: Callable[[Any, Any], Tensor],
    *,
    strategy: str | Plan = "data",
    num_microbatches: int | None = None,
    passes: Sequence[str] = (),
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
        passes: what is done to the program afterwards.
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
    chosen = make_options(options)
    found = environment if environment is not None else detect()
    plan = make_plan(strategy, found, num_microbatches, passes)
    face = make_face(optimizer, model)
    world = open_world(found, plan.num_ranks, chosen.deadline_s)
    team = Team(world, plan, model, loss, face, chosen)
    fixed = num_microbatches is not None or isinstance(strategy, Plan)
    return Step(team, has_fixed_micros=fixed, auto=make_auto(strategy, plan, num_microbatches))
