"""For people with their own loop: one function that takes a global batch through a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from counterpoint.cutting.eager import num_samples
from counterpoint.data.sampler import split
from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.plan import Plan
from counterpoint.runtime.build import call_form
from counterpoint.runtime.feed import BatchFeed, cut
from counterpoint.runtime.optimizers import Face, Factory
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
        self.batch_size = 0

    def __call__(self, inputs: Any, targets: Any) -> float:  # noqa: ANN401 - whatever model and loss take
        """Train on one global batch.

        Args:
            inputs: a tensor, or a tuple or dict of tensors, with the samples along dim 0.
            targets: likewise.

        Returns:
            The mean loss over the batch, before the update.
        """
        count = num_samples(call_form(inputs))
        if self.team.compiled is None:
            self.build(inputs, count)
        feed = BatchFeed((inputs, targets), tuple(split(count, self.team.num_micros)))
        with torch.random.fork_rng(devices=[], enabled=self.team.draws):
            verdict = self.team.step(self.number, feed)
        self.team.face.stepped()
        self.number += 1
        return verdict.loss

    def build(self, inputs: Any, count: int) -> None:  # noqa: ANN401 - whatever the model takes
        """Build the ranks for batches of this size."""
        team = self.team
        if self.auto is not None:
            few = cut(inputs, 0, min(count, FEW_SAMPLES))
            team.plan = self.auto.choose(team.model, team.face, few, team.options, count)
        elif not self.has_fixed_micros:
            team.plan = team.plan.with_microbatches_for(count)
        team.plan.require_batch(count)
        start, stop = split(count, team.plan.num_micros)[0]
        team.build(cut(inputs, start, stop), stop - start)

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose options are used; change them, or put a scheduler on it."""
        return self.team.face.optimizer

    def give_back(self) -> nn.Module:
        """Put the trained weights into the model, on every rank, and return it."""
        self.team.give_back()
        return self.team.model

    def close(self) -> None:
        """Give the weights back and end the connection to the other ranks."""
        self.team.give_back()
        self.team.close()

    def __enter__(self) -> Step:
        """Use the step in a ``with`` block, which closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.team.close()


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
    face = Face(optimizer, dict(model.named_parameters()))
    world = open_world(found, plan.num_ranks, chosen.deadline_s)
    team = Team(world, plan, model, loss, face, chosen)
    fixed = num_microbatches is not None or isinstance(strategy, Plan)
    return Step(team, has_fixed_micros=fixed, auto=make_auto(strategy, plan, num_microbatches))
