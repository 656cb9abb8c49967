"""The interpreter: one rank's row, word by word, on real tensors.

It knows instructions and nothing else; which strategy wrote them is not visible here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext

import torch

from counterpoint.fabric.fabric import Fabric, Group
from counterpoint.model.spec import Unit
from counterpoint.program.instruction import Collective, Commit, Pull, Push, Recv, Release, Send, Swap
from counterpoint.program.tapes import computed_again
from counterpoint.program.text import format_value
from counterpoint.runtime.calls import (
    BackwardRun,
    Call,
    CollectiveRun,
    ForwardRun,
    RecomputeRun,
    Script,
    ServeRun,
    UpdateRun,
    forward_only,
    fuse,
    later,
)
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.exchange import Exchange, put_weights, way_to
from counterpoint.runtime.feed import Feed
from counterpoint.runtime.later import Desk
from counterpoint.runtime.model import Model
from counterpoint.runtime.optimizers import clip_by_value, squared_norm
from counterpoint.runtime.polling import gather_ballots
from counterpoint.runtime.records import Note, RankState
from counterpoint.runtime.seeds import Dice
from counterpoint.runtime.serving import Counter, push_label
from counterpoint.runtime.shares import Shares, domain_of, shares_of
from counterpoint.runtime.store import Store
from counterpoint.runtime.twins import Twins
from counterpoint.runtime.vote import (
    Ballot,
    Guard,
    Verdict,
    ballot_of,
    both,
    decide,
    has_bad_gradient,
    has_bad_loss,
    require_finite,
    require_reached,
    unreached,
    warn_of_parted,
)
from counterpoint.strategies.buckets import Buckets


class Interpreter:
    """Runs one row.

    Args:
        scripts: the row in every kind of step, by name; the last one is the one that evaluations go by.
        model: the functions of the blocks it runs.
        store: the rank's parameters.
        fabric: its way to the other ranks.
        dice: its random state.
        guard: what is checked before updates.
        readers: for each parameter which ranks of this rank's commit compute with it.
        brought: for a group and a unit that it sums in a code the microbatches that each member brings.
        buckets: in which gradients are summed while a backward goes on.
    """

    def __init__(  # noqa: PLR0913 - the parts of one rank
        self,
        scripts: Mapping[str, Script],
        *,
        model: Model,
        store: Store,
        fabric: Fabric,
        dice: Dice,
        guard: Guard,
        readers: Mapping[str, Group],
        brought: Mapping[tuple[Group, Unit], Sequence[Sequence[int]]],
        buckets: Buckets,
    ) -> None:
        self.scripts = {name: (script, fuse(script.words, script.early)) for name, script in scripts.items()}
        self.script, self.calls = list(self.scripts.values())[-1]
        self.forward_calls = fuse(forward_only(self.script.words, self.script.stride))
        self.again = {name: computed_again(script.words, script.stride) for name, script in scripts.items()}
        self.number = 0
        self.before = (0, False)  # of the state: what a step that fails has to leave as it was
        self.swapped: list[Unit] = []  # whose gradients this step has exchanged
        self.sets_aside = any(isinstance(word, Swap) for word in self.script.words)
        self.store = store
        self.fabric = fabric
        self.dice = dice
        self.guard = guard
        self.readers = readers
        runs = [call for call, _, _ in self.calls if isinstance(call, ForwardRun)]
        blocks = {block for run in runs for block in range(run.first, run.last + 1)}
        self.micros = {call.micro for call, _, _ in self.calls if isinstance(call, BackwardRun)}
        self.computed = tuple(unit for unit in store.units if not blocks.isdisjoint(unit))
        calls = [call for _, run in self.scripts.values() for call, _, _ in run]
        has_parts = any(isinstance(call, BackwardRun) and call.part for call in calls)
        self.compute = Compute(model, store, dice, Desk() if has_parts else None)
        self.exchange = Exchange(fabric, self.compute, store, brought, buckets)
        self.twins = Twins((), store)
        self.state = RankState()
        self.clock: Callable[[], float] | None = None
        self.counter = Counter(store, fabric, self.state.journal)

    def step(self, number: int, feed: Feed, turn: str) -> Verdict | None:
        """Run the row of one kind of step once.

        A loss or gradient that is not finite and may not be skipped, or a parameter that got no gradient, is a
        ``DataError``, and no parameter has changed; a rank that failed is a ``PeerError`` on all others.
        """
        self.dice.step = self.number = number
        self.script, calls = self.scripts[turn]
        if self.script.stride:
            calls = tuple((later(call, number * self.script.stride), start, stop) for call, start, stop in calls)
        self.compute.begin(feed, shares_of(self.script, number, feed.sizes), self.script.stride)
        self.compute.again.begin(self.again[turn])
        self.store.begin()
        self.state.verdict, self.state.decided, self.state.leaves_out = None, 0, False
        self.state.notes.clear()
        self.before = (self.state.skipped, self.state.leaves_out_late)
        self.swapped.clear()
        self.exchange.over.clear()
        with self.exchange.early.step():
            self.run(calls)
        return self.state.verdict

    def evaluate(self, feed: Feed, model: Model) -> None:
        """Run only the forwards of the row; losses are in ``compute.losses`` of the ranks with the last block."""
        training = self.compute
        self.compute = Compute(model, self.store, self.dice)
        self.exchange.compute = self.compute
        self.compute.begin(feed, Shares(dict.fromkeys(feed.sizes, 1.0)))
        try:
            with torch.no_grad():
                self.run(self.forward_calls)
        finally:
            self.compute = self.exchange.compute = training

    def run(self, calls: Sequence[tuple[Call, int, int]]) -> None:
        """Run calls in order, taking notes of their times if there is a clock."""
        torch.clear_autocast_cache()  # of weights that may have been changed since
        clock = self.clock
        if clock is None:
            for call, _, _ in calls:
                self.execute(call)
            return
        for call, start, stop in calls:
            began = clock()
            self.execute(call)
            self.state.notes.append(Note(start, stop, began, clock()))
        for one in self.exchange.early.transfers():
            at = self.script.words.index(one.word)
            self.state.notes.append(Note(at, at + 1, one.start_s, one.stop_s, is_transfer=True))

    def execute(self, call: Call) -> None:  # noqa: C901, PLR0912 - one case for each call
        """Run one call."""
        match call:
            case ForwardRun(first, last, micro, version):
                self.compute.forward(first, last, micro, version)
            case RecomputeRun(first, last, micro, version):
                self.compute.recompute(first, last, micro, version)
            case BackwardRun(first, last, micro, version, part="", early=early):
                with self.exchange.early.during(early, self.clock) if early else nullcontext():
                    self.compute.backward(first, last, micro, version)
            case BackwardRun(first, last, micro, part="input"):
                self.compute.backward_input(first, last, micro)
            case BackwardRun(first, last, micro):
                self.compute.backward_weight(first, last, micro)
            case CollectiveRun(words):
                self.collect(words)
            case Send(value, peer, code):
                self.exchange.send(value, peer, code)
            case Recv(value, peer, code):
                self.exchange.recv(value, peer, code)
            case Commit(group, own):
                self.commit(group, own)
            case Swap(unit):
                self.swap(unit)
            case UpdateRun(units):
                self.update(units)
            case Release(value):
                self.exchange.release(value)
            case Push():
                self.push(call)
            case Pull(value, peer):
                put_weights(self.store.units[value.blocks], self.fabric.recv(peer, format_value(value)))
            case ServeRun(words):
                self.counter.serve(words)

    def collect(self, words: Sequence[Collective]) -> None:
        """Run collectives of one phase."""
        if words[0].phase == "":
            self.exchange.collect(words)
        elif words[0].phase == "start":
            self.exchange.start(words[0])
        else:
            self.exchange.wait(words[0])

    def swap(self, unit: tuple[int, ...]) -> None:
        """Set a gradient aside and take back the one before; if that is not to be applied, it is gone."""
        self.store.units[unit].swap()
        self.swapped.append(unit)
        if self.state.leaves_out_late:
            self.store.units[unit].clear()

    def commit(self, group: tuple[int, ...], own: tuple[int, ...]) -> None:
        """Decide with the group whether and how the step is applied."""
        squared, norms = 0.0, self.compute.norms
        if self.guard.needs_norm:
            squared = squared_norm(
                gradient for unit in self.script.answers_for for gradient in self.store.units[unit].gradients()
            )
        feed, domain = self.compute.feed, domain_of(self.script, self.number, self.state.decided)
        missing = [name for unit in self.computed for name in self.store.units[unit].missing()]
        sizes = feed.sizes if feed is not None else {}
        losses = {micro: loss for micro, loss in self.compute.losses.items() if micro in domain}
        first = self.number * self.script.stride
        is_idle = not any(sizes[micro] for micro in domain if micro - first in self.micros)
        ballot = ballot_of(losses, sizes, squared, missing, mark=self.twins.mark(), is_idle=is_idle)
        if norms is not None:
            norms.tell(domain)  # on its way together with the ballots
        ballots = [ballot] if len(group) == 1 else gather_ballots(self.fabric, ballot, group)
        if norms is not None:
            norms.hear()  # here, so that nothing is under way if the step ends in an error
        marks = {rank: one.mark for rank, one in zip(group, ballots, strict=True)}
        self.twins.compare(marks, group, self.fabric, self.number)
        verdict = decide(ballots, group, self.guard, own, self.script.stride)
        self.state.verdict = verdict if self.state.verdict is None else both(self.state.verdict, verdict)
        self.note_what_counts(ballots, verdict, domain)
        self.state.decided += 1
        self.state.skipped = self.state.skipped + 1 if verdict.fault else 0
        is_stream = bool(self.script.stride)
        require_finite(verdict.fault, self.number, self.state.skipped, self.guard, is_stream=is_stream)
        if norms is not None:
            is_bad = has_bad_loss(ballots) if self.sets_aside else bool(verdict.fault)
            norms.commit(is_applied=not is_bad)
        if not self.is_left_out():
            self.settle_missing(ballots, group)
        self.store.settle(applied=not self.is_left_out())
        self.clip(verdict.scale)

    def clip(self, scale: float) -> None:
        """Scale all gradients that updates will use, and then bring every number in them to the size allowed."""
        bound = self.guard.clip_value
        if (scale == 1.0 and bound is None) or self.is_left_out():
            return
        for unit in self.store.units.values():
            for gradient in unit.gradients():
                if scale < 1.0:
                    gradient.mul_(scale)
                if bound is not None:
                    clip_by_value(gradient, bound)

    def note_what_counts(self, ballots: Sequence[Ballot], verdict: Verdict, domain: Collection[int]) -> None:
        """Note which updates are left out: those of a fault, and of gradients that no sample had a part in."""
        state, feed = self.state, self.compute.feed
        has_samples = feed is not None and any(feed.sizes[micro] for micro in domain)
        if self.sets_aside:
            state.leaves_out = state.leaves_out_late or has_bad_gradient(ballots)
            state.leaves_out_late = has_bad_loss(ballots) or not has_samples
        else:
            state.leaves_out = bool(verdict.fault) or not has_samples

    def settle_missing(self, ballots: Sequence[Ballot], group: Group) -> None:
        """Check that every parameter got a gradient on some rank, unless zeros are wanted; where none is, put zeros."""
        if not any(ballot.missing for ballot in ballots):
            return
        if self.compute.unused == "error":
            require_reached(unreached(ballots, self.readers), self.number)
            if group[0] == self.fabric.rank and not self.state.has_told:
                self.state.has_told = warn_of_parted(ballots, group, self.readers, self.number)
        for unit in self.computed:
            self.store.units[unit].fill()

    def update(self, units: tuple[tuple[int, ...], ...]) -> None:
        """Apply the optimizer to some units, unless the step is left out; what it was before stays a version."""
        self.store.begin_version(is_new=not self.is_left_out())
        if self.is_left_out():
            for unit in units:
                self.store.units[unit].clear()
            return
        self.store.update(units)
        torch.clear_autocast_cache()  # of the weights before

    def is_left_out(self) -> bool:
        """Tell whether the last commit decided to leave out the updates behind it; nobody does before a commit."""
        return self.state.leaves_out

    def push(self, word: Push) -> None:
        """Send weights or a gradient to a server; nothing but the label of a gradient that is left out here."""
        unit = self.store.units[word.value.blocks]
        if word.value.name == "weight":
            self.fabric.send(word.peer, push_label(word), [arena.weights.detach() for arena in unit.arenas])
            return
        gradients = [] if self.is_left_out() else self.exchange.gradient_message(unit, word.peer, word.code)
        self.fabric.send(word.peer, push_label(word), gradients)
        for arena in unit.arenas if word.code else ():
            arena.leftovers(way_to(word.peer, self.fabric.rank)).settle(applied=bool(gradients))
        unit.clear()

    def update_runs(self) -> list[tuple[tuple[int, ...], ...]]:
        """Return the units of every optimizer that this row steps."""
        runs = list(dict.fromkeys(call.units for call, _, _ in self.calls if isinstance(call, UpdateRun)))
        served = [call for call, _, _ in self.calls if isinstance(call, ServeRun)]
        return runs + [(unit,) for call in served for word in call.words if word.updates for unit in word.units]

    def changed_buffers(self) -> dict[str, int]:
        """Return for every buffer that this row may change how many microbatches do so in a step."""
        changed: dict[str, int] = {}
        for call, _, _ in self.calls:
            if isinstance(call, ForwardRun):
                for segment in self.compute.between(call.first, call.last):
                    for name in segment.buffers:
                        changed[name] = changed.get(name, 0) + 1
        return changed
