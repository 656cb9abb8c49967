"""What a place does in a superstep: compute a share of a batch, or update a slice."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from counterpoint.data.sampler import Sampler, split
from counterpoint.errors import CounterpointError, DataError
from counterpoint.runtime.optimizers import clip_by_value, squared_norm
from counterpoint.runtime.seeds import mixed
from counterpoint.runtime.vote import Ballot, ballot_of
from counterpoint.spark.exchange import Addressed
from counterpoint.spark.parcels import Kind, Parcel
from counterpoint.spark.recipe import Recipe, replica_of
from counterpoint.spark.samples import read_samples
from counterpoint.spark.slices import from_bytes, parts_of, read_slice, span_of, to_bytes, update, write_slice


@dataclass(frozen=True, slots=True)
class Share:
    """Which samples are where, and in which order they are read.

    Args:
        sampler: of the whole dataset, the same as of a run on one rank.
        starts: the number of each place's first sample, and behind the last that of all samples.
        digests: of each place's samples, as they were when they were first read.
    """

    sampler: Sampler
    starts: tuple[int, ...]
    digests: tuple[str, ...]

    def of(self, place: int, epoch: int, batch: int) -> Tensor:
        """Return which of a place's samples are in a batch, counted from its first."""
        indices = torch.from_numpy(self.sampler.batch(epoch, batch))
        low, high = self.starts[place], self.starts[place + 1]
        return indices[(indices >= low) & (indices < high)] - low


@dataclass(frozen=True, slots=True)
class Note:
    """What a place tells the driver.

    Args:
        ballot: what it knows of the step.
        failure: what went wrong in code of the user's, empty if nothing did.
        sent_bytes: of what it has sent to other places.
        seconds: how long it computed its samples; 0 where it had none.
    """

    ballot: Ballot
    failure: str = ""
    sent_bytes: int = 0
    seconds: float = 0.0


def write_note(note: Note) -> bytes:
    """Return a note as JSON."""
    ballot = note.ballot
    numbers = [repr(ballot.loss_sum), ballot.num_samples, repr(ballot.squared_norm), ballot.worst]
    plain = {
        "numbers": numbers,
        "missing": list(ballot.missing),
        "idle": ballot.is_idle,
        "failure": note.failure,
        "sent": note.sent_bytes,
        "seconds": note.seconds,
    }
    return json.dumps(plain).encode()


def read_note(text: bytes) -> Note:
    """Return what ``write_note`` was given; nan and inf among it.

    Example:
        >>> read_note(write_note(Note(Ballot(float("inf"), 3, 2.0, 1, ("weight",)))))
        Note(ballot=Ballot(loss_sum=inf, num_samples=3, squared_norm=2.0, worst=1, missing=('weight',), mark=0, \
is_idle=False), failure='', sent_bytes=0, seconds=0.0)
    """
    plain = json.loads(text)
    loss_sum, count, squared, worst = plain["numbers"]
    ballot = Ballot(float(loss_sum), count, float(squared), worst, tuple(plain["missing"]), is_idle=plain["idle"])
    return Note(ballot, plain["failure"], plain["sent"], plain["seconds"])


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Compute the place's share of a batch with the newest weights; its gradient goes to those who update, in slices.

    Args:
        recipe: of the training.
        share: which samples.
        step: of the run.
        epoch: which.
        batch: of the epoch.
        micros: the microbatches of each place.
        limit_s: no microbatch but the first is begun after so long; None for no limit.
    """

    recipe: Recipe
    share: Share
    step: int
    epoch: int
    batch: int
    micros: tuple[tuple[int, ...], ...]
    limit_s: float | None = None

    def __call__(self, place: int, parcels: Sequence[Parcel]) -> Iterator[Addressed]:
        """Yield slices of the gradient, the place's own state, and a note."""
        num_places = len(self.micros)
        (state,) = [one for one in parcels if one.kind is Kind.STATE]
        yield place, replace(state, step=self.step)
        try:
            gradient, ballot, seconds = self._compute(place, parcels)
        except Exception as error:  # noqa: BLE001 - whatever the model or the loss raise; Spark would only try again
            text = str(error) if isinstance(error, CounterpointError) else _last_lines(error)
            yield num_places, Parcel(Kind.NOTE, place, self.step, write_note(Note(Ballot(), text)))
            return
        bounds, sent = self.recipe.layout.bounds(num_places), 0
        for target in range(num_places):
            payload = to_bytes(gradient[bounds[target] : bounds[target + 1]], self.recipe.code)
            sent += len(payload) if target != place else 0
            yield target, Parcel(Kind.GRADIENT, place, self.step, payload)
        yield num_places, Parcel(Kind.NOTE, place, self.step, write_note(Note(ballot, "", sent, seconds)))

    def _compute(self, place: int, parcels: Sequence[Parcel]) -> tuple[Tensor, Ballot, float]:
        recipe, micros = self.recipe, self.micros[place]
        replica = replica_of(recipe)
        put_weights(recipe, replica.flat, parcels)
        fields = read_samples(parcels, self.share.digests[place], place)
        rows = self.share.of(place, self.epoch, self.batch)
        whole = self.share.sampler.batch_len(self.batch)
        losses: dict[int, float] = {}
        sizes: dict[int, int] = {}
        began = time.perf_counter()
        replica.clear()
        for micro, (low, high) in zip(micros, split(len(rows), len(micros)), strict=True):
            if low == high or self._is_late(began, losses):
                continue
            *inputs, target = (field[rows[low:high]] for field in fields)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(mixed(recipe.seed, self.step, micro))
                loss = recipe.loss(replica.model(*inputs), target)
            (loss * ((high - low) / whole)).backward()  # type: ignore[no-untyped-call]
            losses[micro], sizes[micro] = float(loss.detach()), high - low
        missing = replica.missing(recipe.layout)
        gradient = replica.gradient()
        replica.clear()
        squared = squared_norm([gradient]) if losses else 0.0
        seconds = time.perf_counter() - began if losses else 0.0
        return gradient, ballot_of(losses, sizes, squared, missing, is_idle=not losses), seconds

    def _is_late(self, began: float, losses: Mapping[int, float]) -> bool:
        """Tell whether the next microbatch is left out because the place is too slow; its first one never is."""
        return bool(losses) and self.limit_s is not None and time.perf_counter() - began > self.limit_s


@dataclass(frozen=True, slots=True)
class Add:
    """Add up the slices of a gradient, and say how long it is: what clipping by the norm has to know before an update.

    Args:
        recipe: of the training.
        step: of the run.
        num_places: how many there are.
    """

    recipe: Recipe
    step: int
    num_places: int

    def __call__(self, place: int, parcels: Sequence[Parcel]) -> Iterator[Addressed]:
        """Yield the place's slice of the sum, its own state, and a note."""
        total = added(self.recipe, parcels)
        yield place, next(one for one in parcels if one.kind is Kind.STATE)
        yield place, Parcel(Kind.GRADIENT, place, self.step, to_bytes(total, ""))
        squared = squared_norm([total]) if total.numel() else 0.0
        yield self.num_places, Parcel(Kind.NOTE, place, self.step, write_note(Note(Ballot(squared_norm=squared))))


@dataclass(frozen=True, slots=True)
class Update:
    """Add up the slices of a gradient, apply the optimizer to the place's slice, and publish it.

    Args:
        recipe: of the training.
        step: of the run.
        num_places: how many there are.
        is_applied: whether anything is updated; else weights are published as they are.
        is_added: whether the slices are added up already.
        is_told: whether the driver is told the slice, too.
        lr_factor: what the learning rate is multiplied with.
        scale: what gradients are multiplied with.
        clip_value: what numbers of the gradient are brought to at most.
    """

    recipe: Recipe
    step: int
    num_places: int
    is_applied: bool = True
    is_added: bool = False
    is_told: bool = False
    lr_factor: float = 1.0
    scale: float = 1.0
    clip_value: float | None = None

    def __call__(self, place: int, parcels: Sequence[Parcel]) -> Iterator[Addressed]:
        """Yield the slice's weights for everybody and its state for the place itself."""
        recipe = self.recipe
        text = next(one.payload for one in parcels if one.kind is Kind.STATE)
        weights, states = read_slice(text)
        if self.is_applied:
            total = added(replace(recipe, code="") if self.is_added else recipe, parcels)
            if self.scale != 1.0:
                total *= self.scale
            if self.clip_value is not None:
                clip_by_value(total, self.clip_value)
            span = span_of(place, self.num_places)
            parts, gradients = (parts_of(recipe.layout, span, flat) for flat in (weights, total))
            kept = update(recipe.rule, parts, gradients, states, self.lr_factor)
            text = write_slice(weights, kept)
        published = to_bytes(weights, recipe.code)
        for target in range(self.num_places):
            yield target, Parcel(Kind.WEIGHTS, place, self.step, published)
        yield place, Parcel(Kind.STATE, place, self.step, text)
        sent = len(published) * (self.num_places - 1)
        yield self.num_places, Parcel(Kind.NOTE, place, self.step, write_note(Note(Ballot(), sent_bytes=sent)))
        if self.is_told:
            yield self.num_places, Parcel(Kind.STATE, place, self.step, text)


def added(recipe: Recipe, parcels: Sequence[Parcel]) -> Tensor:
    """Return the sum of gradients, in the order of those who sent them, each brought to the weights' dtype first."""
    found = [from_bytes(one.payload, recipe.layout.dtype, recipe.code) for one in parcels if one.kind is Kind.GRADIENT]
    total = found[0]
    for gradient in found[1:]:
        total += gradient
    return total


def put_weights(recipe: Recipe, flat: Tensor, parcels: Sequence[Parcel]) -> None:
    """The vector has the weights of all slices.

    Raises:
        DataError: it is not all of them that have come.
    """
    found = [from_bytes(one.payload, flat.dtype, recipe.code) for one in parcels if one.kind is Kind.WEIGHTS]
    whole = torch.cat(found) if found else flat[:0]
    if whole.numel() != flat.numel():
        raise DataError(f"{whole.numel():,} of {flat.numel():,} weights have come; the shuffle has lost the others")
    flat.copy_(whole)


def _last_lines(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
