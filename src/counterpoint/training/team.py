"""The ranks that live in this process: all of them on the local transport, or one of many processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.compiler.compile import Compiled, compile  # noqa: A004 - read as cp.compile
from counterpoint.cutting.cut import Cut
from counterpoint.cutting.graph import GraphCut
from counterpoint.cutting.mixing import require_apart
from counterpoint.cutting.slices import verify_split
from counterpoint.cutting.whole import WholeCut
from counterpoint.errors import PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.plan import Plan
from counterpoint.planner.choose import Choice
from counterpoint.program.instruction import Release, Serve
from counterpoint.program.turn import Turn
from counterpoint.runtime.build import (
    Parts,
    Rank,
    build_rank,
    call_form,
    copy_values,
    groups_of,
    renormalizes,
    require_no_hooks,
    slice_of,
    slices_of,
)
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.model import Model
from counterpoint.runtime.norm_rules import norms_for
from counterpoint.runtime.optimizers import Face
from counterpoint.runtime.state import (
    Book,
    gather_weights,
    has_everything,
    settle_buffers,
    spread_weights,
    write_weights,
)
from counterpoint.runtime.vote import Verdict
from counterpoint.strategies.pipeline import Pipeline
from counterpoint.training.checks import require_own_memory
from counterpoint.training.cutting import as_cut, cut_for, described, plan_in_words, with_timing_of
from counterpoint.training.elsewhere import Elsewhere
from counterpoint.training.failing import abandoning, noting
from counterpoint.training.flight import Flight, require_clippable, require_memory
from counterpoint.training.keeping import Keeping
from counterpoint.training.norms import has_meetings, judge_norms
from counterpoint.training.one_copy import with_one_copy
from counterpoint.training.options import Options, guard_of
from counterpoint.training.same_model import require_same_model, share_first_values
from counterpoint.training.watch import Watch
from counterpoint.training.world import World


class Team:
    """The ranks of this process, built for one model and plan.

    Args:
        world: where they run.
        plan: who does what.
        model: the user's model; it gets the trained weights back from :meth:`give_back`.
        loss: from the model's output and the targets to the mean loss.
        face: the user's optimizer.
        options: how the run trains.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor],
        face: Face,
        options: Options,
    ) -> None:
        plan.require_ranks(world.fabrics[0].num_ranks)
        self.world = world
        self.plan = plan
        self.buckets = plan.buckets  # as they are when the ranks are built
        self.model = model
        self.loss = loss
        self.may_share = options.one_copy and not renormalizes(model)  # whether replicas may have one copy of weights
        self.face = face
        self.options = with_timing_of(plan, options)
        self.keeping = Keeping(wanted=options.keep_freed)
        self.compiled: Compiled | None = None
        self.num_micros = 0  # microbatches in one step of all ranks, once built
        self.parts: Parts | None = None
        self.draws = True
        self.ranks: dict[int, Rank] = {}
        self.has_late = False  # whether gradients are set aside that are still to be applied
        self.flight = Flight()
        self.evaluations: dict[int, Model] = {}
        self.watch: Watch | None = None
        self.elsewhere = Elsewhere({})
        self.choice: Choice | None = None  # what the plan was weighed against, where that was left open

    def build(self, inputs: Any, num_samples: int) -> Compiled:  # noqa: ANN401 - whatever the model takes
        """Cut the model, compile the plan for it, and make the ranks; once.

        Args:
            inputs: the model's inputs for one microbatch.
            num_samples: how many samples these are.

        Raises:
            PlanError: the model and the plan do not fit together, or ranks hold different models.
        """
        if self.compiled is not None and self.watch is not None:
            return self.compiled
        if self.may_share and self.face.is_elementwise:
            self.plan = with_one_copy(self.plan, self.world.fabrics[0].hosts)
        self.compare_models()
        cut = cut_for(self.plan, self.model, inputs, self.options)
        require_no_hooks(self.model, cut, self.plan)
        require_own_memory(self.model, self.plan)
        if self.options.mixing == "error" and any(isinstance(strategy, Pipeline) for strategy in self.plan.strategies):
            require_apart(self.model, call_form(inputs), str(self.plan), self.plan.num_micros)
        self.draws = cut.draws
        timing, samples = self.options.timing, max(num_samples, 1)
        spec = described(cut, self.face, self.plan, timing, samples)
        self.compiled = compile(as_cut(self.plan, spec, timing), spec, samples_per_micro=samples)
        self.num_micros = len(self.compiled.program.micros)
        self.flight = Flight.of(self.compiled.turns[-1])
        require_clippable(self.compiled, self.options)
        require_memory(self.compiled, self.world.fabrics[0].hosts, self.world.fabrics[0].rank)
        self.require_whole_parameters()
        judge_norms(self.model, self.compiled, num_samples, self.options.batch_norm, self.world.fabrics[0].rank)
        if isinstance(cut, GraphCut) and any(block.split is not None for block in self.compiled.model.blocks):
            verify_split(cut, self.compiled.model, dict(self.model.named_parameters()))
        compiled, guard = self.compiled, guard_of(self.options)
        self.parts = Parts(compiled.turns, compiled.model, self.loss, self.face, guard, self.options.seed, self.buckets)
        self.make_ranks(cut, inputs)
        return self.compiled

    def make_ranks(self, cut: Cut, inputs: Any) -> None:  # noqa: ANN401 - as above
        """Make this process's ranks from a cut of the model."""
        assert self.parts is not None, "compiled"
        assert self.compiled is not None, "compiled"
        first, groups = self.world.fabrics[0].rank, groups_of(turn.program for turn in self.compiled.turns)
        words = [word for _, word in self.compiled.program.words() if isinstance(word, Release)]
        keeps_own = self.book().num_replicas > 1 or any(word.value.name == "weight" for word in words)
        needs_own = isinstance(cut, WholeCut) or has_meetings(self.model, self.options)  # ranks meet inside
        for fabric in self.world.fabrics:
            fabric.form(groups)
            own_cut, model = cut, self.model
            if (isinstance(cut, WholeCut) and keeps_own) or (needs_own and fabric.rank != first):
                model = copy.deepcopy(self.model)  # whatever happens, the user's own keeps its memory
                own_cut = cut_for(self.plan, model, inputs, self.options)
            rank = build_rank(self.parts, own_cut, model, fabric, is_only=len(self.world.fabrics) == 1)
            rank.interpreter.compute.unused = self.options.unused
            rank.interpreter.compute.norms = norms_for(self.parts, model, rank.interpreter, self.options.batch_norm)
            rank.interpreter.store.apart = self.keeping.apart
            self.ranks[fabric.rank] = rank
        self.watch = Watch(self.model, self.ranks.values(), self.world.fabrics[0].num_ranks)
        self.elsewhere = Elsewhere.of(self.model, self.ranks, self.parts.spec)

    def require_whole_parameters(self) -> None:
        """Check that nobody slices what the optimizer has to see in one piece.

        Raises:
            PlanError: the plan does.
        """
        assert self.compiled is not None, "compiled"
        names = [name for block in self.compiled.model.blocks if block.split for name, _ in block.split.slices]
        if names and not self.face.is_elementwise:
            raise PlanError(
                f"{self.face.kind.__name__} may look at whole tensors, but under {self.plan} a rank has only a slice "
                f"of {names[0]} and {len(names) - 1} others; its updates would be others than without the plan: take "
                "an optimizer that treats every number apart (AdamW, SGD), or data, zero or pipeline"
            )

    def compare_models(self) -> None:
        """Check that all processes hold the same model and plan, and give all of them rank 0's values.

        Raises:
            PlanError: they differ, as :mod:`counterpoint.training.same_model` says.
        """
        fabric = self.world.fabrics[0]
        if len(self.world.fabrics) < fabric.num_ranks:
            plan = plan_in_words(self.plan, self.options.timing)
            require_same_model(fabric, self.model, plan, self.face.optimizer)
            share_first_values(fabric, self.model, self.options.init)

    def step(self, number: int, feed: Feed) -> Verdict:
        """Run one training step on all ranks and return what the first of this process's ranks decided."""
        turn, is_alone = self.turn_at(number), len(self.world.fabrics) == self.world.fabrics[0].num_ranks
        if self.watch is not None and is_alone:
            self.watch.require_unchanged(self.plan, "")

        def work(fabric: Fabric) -> Verdict | None:
            """Take the step on one rank; return its verdict, None where it has none."""
            interpreter = self.ranks[fabric.rank].interpreter
            if self.watch is not None and not is_alone:
                self.watch.require_unchanged(self.plan, f"on rank {fabric.rank} ")
            self.elsewhere.leave()  # in the first step, and where a model given back is trained further
            with noting(interpreter, fabric.rank):
                if self.may_share:
                    interpreter.store.enter_commons(fabric)
                return interpreter.step(number, feed, turn.name)

        with abandoning(self.world, self.ranks, self.flight):
            found = [verdict for verdict in self.world.run(work) if verdict is not None]
        self.keeping.begin()  # what building and the first step have freed is gone, what later ones free is not
        self.has_late = self.plan.rhythm.late > 0
        return found[0] if found else Verdict(float("nan"), 0, float("nan"), 1.0, "")

    def turn_at(self, number: int) -> Turn:
        """Return what kind of step the next one is, if it has this number."""
        assert self.compiled is not None, "built"
        return self.compiled.turn_at(number, has_late=self.has_late)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the model's weights on every rank inside, where replicas have their own, and these afterwards."""
        book = self.book()
        if book.num_replicas == 1:
            yield
            return

        def take_mean(fabric: Fabric) -> list[Tensor]:
            rank = self.ranks[fabric.rank]
            own = [arena.weights.detach().clone() for arena in rank.interpreter.store.arenas()]
            spread_weights(book, rank, fabric)
            return own

        kept = dict(zip(self.ranks, self.world.run(take_mean), strict=True))
        try:
            yield
        finally:
            for number, own in kept.items():
                for arena, weights in zip(self.ranks[number].interpreter.store.arenas(), own, strict=True):
                    arena.weights.data.copy_(weights)

    def evaluate(self, feed: Feed, measure: Callable[[Any, Any], Any], number: int) -> None:
        """Run the model forward in evaluation mode; ``measure`` gets outputs and targets where the last block is."""

        def watch(outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401 - whatever the model gives
            measure(outputs, targets)
            return torch.zeros(())

        def work(fabric: Fabric) -> None:
            interpreter = self.ranks[fabric.rank].interpreter
            if fabric.rank not in self.evaluations:
                self.evaluations[fabric.rank] = replace(self.ranks[fabric.rank].evaluation(), loss=watch)
            interpreter.dice.step = number
            interpreter.evaluate(feed, replace(self.evaluations[fabric.rank], loss=watch))

        self.world.run(work)

    def settle(self) -> None:
        """Bring running statistics, and weights that live on servers, to the same state on all ranks."""
        assert self.parts is not None, "built"
        book = self.book()
        has_servers = any(isinstance(word, Serve) and word.updates for _, word in self.parts.program.words())
        names = [name for name, _ in self.model.named_buffers()]

        def work(fabric: Fabric) -> None:
            """One rank has the newest weights and running statistics."""
            rank = self.ranks[fabric.rank]
            if rank.interpreter.compute.norms is not None:
                rank.interpreter.compute.norms.drop()
            if has_servers:
                spread_weights(book, rank, fabric)
            if names and fabric.num_ranks > 1:
                settle_buffers(rank, fabric, names, rank.interpreter.changed_buffers())

        self.world.run(work)

    def book(self) -> Book:
        """Return who answers for what."""
        assert self.parts is not None, "built"
        return Book(self.parts, {name: param.dtype for name, param in self.model.named_parameters()})

    def give_back(self) -> None:
        """Put the trained weights and buffers into the user's model, on every rank."""
        if self.watch is None:  # it was never built whole
            return
        self.settle()
        self.flight.require_flushed("give_back()")
        book, first = self.book(), self.world.fabrics[0].rank
        full: Mapping[str, Tensor] = self.ranks[first].interpreter.store.params
        if not has_everything(book):
            full = self.world.run(lambda fabric: gather_weights(book, self.ranks[fabric.rank], fabric))[0]
        self.world.run(lambda fabric: self.ranks[fabric.rank].interpreter.store.leave_commons(fabric))
        store = self.ranks[first].interpreter.store
        for arena in store.arenas():
            arena.restore_weights()
        with torch.no_grad():
            copy_values(self.model, full)
            copy_values(self.model, store.buffers)
        self.keeping.end()
        if self.watch is not None:
            self.watch.note()

    def take(self) -> None:
        """Bring the user's model, which may have been changed since :meth:`give_back`, to all ranks."""
        book, params = self.book(), dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers())

        def work(fabric: Fabric) -> None:
            """One rank has the model's values as its newest, and nothing of before."""
            store = self.ranks[fabric.rank].interpreter.store
            write_weights(book, self.ranks[fabric.rank], lambda name: params[name].detach().clone())
            for arena in store.arenas():
                arena.release_weights()  # where shares are joined, what was joined before is old now
                arena.late = None
            self.ranks[fabric.rank].interpreter.state.leaves_out_late = False
            for name, buffer in store.buffers.items():
                buffer.copy_(buffers[name].clone())

        self.world.run(work)
        self.has_late = False
        self.take_frozen()

    def take_frozen(self) -> None:
        """Bring the parameters that are not trained, which are the model's own, to all ranks."""
        assert self.parts is not None, "built"
        named, sliced = dict(self.model.named_parameters()), slices_of(self.parts.spec)
        for number, rank in self.ranks.items():
            row = self.parts.program.rows[number]
            for name, param in rank.interpreter.store.params.items():
                if not param.requires_grad and param is not named[name]:
                    value = slice_of(named[name].detach(), sliced.get(name), (row.slice_index, row.num_slices))
                    param.data.copy_(value)
        if self.watch is not None:
            self.watch.note()

    def close(self) -> None:
        """Leave the world; nothing of it is left running."""
        for rank in self.ranks.values():
            rank.interpreter.store.leave_commons(None)
        self.keeping.end()
        self.elsewhere.lose()
        self.world.close()
