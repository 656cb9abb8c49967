"""A training as the driver sees it: one superstep computes gradients, a second updates and hands out weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from counterpoint.data.sampler import Cursor
from counterpoint.errors import DataError, PlanError
from counterpoint.optim.options import require_counts
from counterpoint.runtime.vote import Ballot, Guard, Verdict, decide, require_finite, require_reached, unreached
from counterpoint.spark.exchange import Exchange, Held
from counterpoint.spark.parcels import Kind, Parcel
from counterpoint.spark.recipe import Recipe, Unused
from counterpoint.spark.slices import Code
from counterpoint.spark.stragglers import Drop, Limit
from counterpoint.spark.works import Add, ForwardBackward, Note, Share, Update, read_note
from counterpoint.training.saving import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How long is trained, and how.

    Args:
        batch_size: samples of one *global* batch, over all partitions; it need not divide into anything.
        epochs: passes over the data.
        max_steps: steps of the whole run at most, those before a resume included.
        micros: into how many microbatches a partition cuts its share of a batch.
        seed: of the order of samples, and of what the model draws.
        guard: clipping, and what a loss that is not finite means.
        schedule: from the step to a factor of the learning rate.
        code: ``bf16`` for gradients and published weights in 16 bits, rounded to the nearest; sums and updates are made
            in the dtype of the weights.
        unused: what a parameter without a gradient means: ``error``, or ``zero`` for a gradient of zeros.
        save_to: folder of checkpoints, which the driver sees; written at the end.
        save_every: also save after so many steps.
        keep: how many checkpoints stay; None keeps all.
        cut_every: after so many steps slices come to the driver and begin there anew, so that what Spark would have to
            compute again for a lost executor, and its shuffle files, go back no further.
        drop: when partitions that are too slow are left out of a step, by microbatches; None for never.
        retries: so often the run goes on from the last slices that came to the driver where Spark has given up a job,
            which it does when a task has failed several times; then the error is raised.

    Raises:
        PlanError: a number makes no sense.
    """

    batch_size: int
    epochs: int = 1
    max_steps: int | None = None
    micros: int = 1
    seed: int = 0
    guard: Guard = field(default_factory=Guard)
    schedule: Callable[[int], float] | None = None
    code: Code = ""
    unused: Unused = "error"
    save_to: Path | None = None
    save_every: int | None = None
    keep: int | None = 3
    cut_every: int = 20
    drop: Drop | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        require_counts(batch_size=self.batch_size, epochs=self.epochs, micros=self.micros, cut_every=self.cut_every)
        require_counts(optional=True, max_steps=self.max_steps, save_every=self.save_every, keep=self.keep)
        if type(self.retries) is not int or self.retries < 0:
            raise PlanError(f"retries={self.retries!r} is no number of times; give 0 for none, or 1, 2, ...")

    def num_steps(self, num_batches: int) -> int:
        """Return how many steps the whole run has."""
        steps = self.epochs * num_batches
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, slots=True)
class Done:
    """A step is over.

    Args:
        progress: how far the run has come with it.
        loss: mean over the batch, before the update.
        num_samples: of the batch.
        sent_bytes: what places have sent to other places: gradients there, weights back.
        is_skipped: whether nothing was updated.
        slices: of all places, where they have come to the driver with this step.
    """

    progress: Progress
    loss: float
    num_samples: int
    sent_bytes: int
    is_skipped: bool = False
    slices: tuple[bytes, ...] = ()


class Run:
    """A training over an exchange.

    Args:
        exchange: between places that have samples.
        recipe: what places have to know.
        share: which samples are where.
        micros: the microbatches of each place's row of the program.
        options: how long, and how.
    """

    def __init__(
        self,
        exchange: Exchange,
        recipe: Recipe,
        share: Share,
        micros: tuple[tuple[int, ...], ...],
        options: Options,
    ) -> None:
        self.exchange, self.recipe, self.share, self.micros, self.options = exchange, recipe, share, micros, options
        self.places = range(exchange.num_places)
        self.num_batches = share.sampler.num_batches
        self.limit = Limit(options.drop)
        self.num_steps = options.num_steps(self.num_batches)

    def steps(self, slices: Sequence[bytes], progress: Progress) -> Iterator[Done]:
        """Train from slices and a place in the run to its end; the last step has the slices that came out.

        Raises:
            DataError: a loss is not finite, a parameter is unused, or the model or the loss failed on some samples.
            LaunchError: Spark gave up a job.
        """
        held, skipped = self._publish(slices, progress.step), 0
        while progress.step < self.num_steps:
            step, whole = progress.step, self.share.sampler.batch_len(progress.cursor.batch)
            held, verdict, sent = self._compute(held, step, progress.cursor)
            verdict, guard = self._judged(verdict, whole)
            skipped = skipped + 1 if verdict.fault else 0
            require_finite(verdict.fault, step, skipped, guard)
            progress = Progress(step + 1, progress.cursor.advance(self.num_batches))
            is_told = self._is_told(progress.step)
            held, told, published = self._update(held, verdict, step, whole, is_told=is_told)
            if is_told:
                self.exchange.forget(held)  # it goes on from the slices, if at all
                held = self._publish(told, progress.step)
            yield Done(progress, verdict.loss, verdict.num_samples, sent + published, bool(verdict.fault), tuple(told))

    def _judged(self, verdict: Verdict, whole: int) -> tuple[Verdict, Guard]:
        """Return the verdict, against a step of which too much came too late, and what its fault means."""
        guard, drop = self.options.guard, self.options.drop
        if verdict.fault or drop is None or not drop.is_too_few(verdict.num_samples, whole):
            return verdict, guard
        fault = f"{verdict.num_samples} of {whole} samples were computed in time"
        return replace(verdict, fault=fault), replace(guard, nonfinite="skip")

    def _is_told(self, step: int) -> bool:
        """Tell whether slices come to the driver with the step that makes the run so long."""
        every = self.options.save_every if self.options.save_to is not None else None
        is_saved = every is not None and step % every == 0
        return is_saved or step == self.num_steps or step % self.options.cut_every == 0

    def _publish(self, slices: Sequence[bytes], step: int) -> Held:
        """Hand out the weights of slices that are at the driver; it runs with the next superstep."""
        parcels = [(place, Parcel(Kind.STATE, place, step, text)) for place, text in enumerate(slices)]
        work = Update(self.recipe, step, len(self.places), is_applied=False)
        return self.exchange.hand(self.exchange.begin(parcels), work, f"step {step}")

    def _compute(self, held: Held, step: int, cursor: Cursor) -> tuple[Held, Verdict, int]:
        """Carry out the first superstep: forward, backward, gradients to those who update them."""
        label = f"forward-backward of step {step}"
        limit_s = self.limit.seconds
        work = ForwardBackward(self.recipe, self.share, step, cursor.epoch, cursor.batch, self.micros, limit_s)
        held = self.exchange.hand(held, work, label, with_samples=True)
        notes = self._notes(held, label)
        self.limit.add([note.seconds for note in notes if note.seconds])
        ballots = [note.ballot for note in notes]
        self._require_reached(ballots, step)
        guard = replace(self.options.guard, clip_norm=None, watch="gradients")
        return held, decide(ballots, self.places, guard), sum(note.sent_bytes for note in notes)

    def _update(
        self, held: Held, verdict: Verdict, step: int, whole: int, *, is_told: bool
    ) -> tuple[Held, list[bytes], int]:
        """Carry out the second superstep, or with clipping by the norm two: sums, updates, weights to everybody."""
        guard = self.options.guard
        scale = whole / verdict.num_samples if verdict.num_samples else 1.0  # 1, but where samples came too late
        is_added = guard.clip_norm is not None and not verdict.fault
        if is_added:
            label = f"norm of step {step}"
            held = self.exchange.hand(held, Add(self.recipe, step, len(self.places)), label)
            squares = (note.ballot.squared_norm * scale**2 for note in self._notes(held, label))
            scale *= decide([Ballot(squared_norm=square) for square in squares], self.places, guard).scale
        label = f"parameter synchronization of step {step}"
        work = Update(
            self.recipe,
            step,
            len(self.places),
            is_applied=not verdict.fault,
            is_added=is_added,
            is_told=is_told,
            lr_factor=self.options.schedule(step) if self.options.schedule is not None else 1.0,
            scale=scale,
            clip_value=guard.clip_value,
        )
        held = self.exchange.hand(held, work, label)
        parcels = self.exchange.notes(held, label)
        sent = sum(read_note(one.payload).sent_bytes for one in parcels if one.kind is Kind.NOTE)
        return held, [one.payload for one in parcels if one.kind is Kind.STATE], sent

    def _notes(self, held: Held, label: str) -> list[Note]:
        """Return what all places tell.

        Raises:
            DataError: code of the user's failed in one.
        """
        parcels = self.exchange.notes(held, label)
        notes = [read_note(parcel.payload) for parcel in parcels]
        for parcel, note in zip(parcels, notes, strict=True):
            if note.failure:
                raise DataError(f"partition {parcel.sender} failed in the {label}: {note.failure}")
        return notes

    def _require_reached(self, ballots: Sequence[Ballot], step: int) -> None:
        if self.options.unused == "error":
            busy = [ballot for ballot in ballots if not ballot.is_idle]
            readers: Mapping[str, tuple[int, ...]] = {
                slot.name: tuple(range(len(busy))) for slot in self.recipe.layout.slots
            }
            require_reached(unreached(busy, readers), step)
