"""The state of a run as logical tensors, whatever the layout: gathered, written as pieces, and read back.

Names in a checkpoint: ``model:<parameter>``, ``buffer:<buffer>`` and ``optimizer.<key>:<parameter>``; a sliced
parameter has one entry per slice, ``model:<parameter>@1/2``, and one that replicas update apart one for each of them,
``model:<parameter>~1/4``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn, optim

from counterpoint.checkpoint.piece import Piece, dtype_name, torch_dtype, whole
from counterpoint.errors import CheckpointError
from counterpoint.fabric.fabric import Fabric, Json
from counterpoint.program.instruction import Serve
from counterpoint.program.text import format_unit
from counterpoint.runtime.build import Holding, Parts, Rank, holdings, replicas_of, slice_of, slices_of
from counterpoint.runtime.layout import WHOLE, Layout, Slot, Span, lay_out
from counterpoint.runtime.roles import roles_of
from counterpoint.runtime.store import UnitStore

ONE_FOR_ALL: frozenset[str] = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as one number for a whole tensor, however small that tensor is."""


@dataclass(frozen=True, slots=True)
class Book:
    """Who answers for what, and how it lies in arenas; the same on every rank.

    Args:
        parts: what all ranks are built from.
        dtypes: of every trainable parameter.
    """

    parts: Parts
    dtypes: Mapping[str, torch.dtype]

    def layouts(self, unit: tuple[int, ...]) -> tuple[Layout, ...]:
        """Return how a unit lies in its arenas on any rank that holds it."""
        spec, face = self.parts.spec, self.parts.face
        described = [
            (name, spec.shard_shape(name), self.dtypes[name], face.group_of[name]) for name in spec.units[unit]
        ]
        return lay_out(described, cut_anywhere=face.is_elementwise)

    def holdings(self) -> list[Holding]:
        """Return who answers for every part."""
        return holdings(self.parts)

    @property
    def num_replicas(self) -> int:
        """How many replicas have weights of their own."""
        return max(1, len(replicas_of(self.parts.turns[-1])))

    @property
    def center(self) -> int | None:
        """The replica whose weights are the model's; None where these are the mean of all."""
        return self.num_replicas - 1 if self.parts.turns[-1].center else None

    def replica_of(self, rank: int) -> int:
        """Return the replica that a rank belongs to."""
        owners = replicas_of(self.parts.turns[-1])
        return next((index for index, own in enumerate(owners) if rank in own), 0)

    def suffix(self, name: str, slice_index: int, replica: int) -> str:
        """Return ``@1/2`` for a sliced parameter and ``~1/4`` where replicas have their own, nothing for any other."""
        sliced = slices_of(self.parts.spec)
        own = f"~{replica}/{self.num_replicas}" if self.num_replicas > 1 else ""
        return (f"@{slice_index}/{sliced[name][1]}" if name in sliced else "") + own


def flat_weights(store: UnitStore, layout: Layout, low: int, high: int) -> Tensor:
    """Return the elements from ``low`` to ``high`` of a unit's weights in one dtype."""
    for arena in store.arenas:
        if arena.layout.dtype == layout.dtype:
            return arena.view_of_flat(low, high)
    flat = torch.cat([store.params[slot.name].detach().reshape(-1) for slot in layout.slots])
    return flat[low:high]


def gather_weights(book: Book, rank: Rank, fabric: Fabric) -> dict[str, Tensor]:
    """Return every trainable parameter of the model in full on every rank; all ranks call it together."""
    everyone = tuple(range(fabric.num_ranks))
    copies: dict[tuple[tuple[int, ...], int, torch.dtype], dict[int, Tensor]] = {}
    for holding in book.holdings():
        for layout in book.layouts(holding.unit):
            low, high = layout.range_of(holding.span)
            key = (holding.unit, holding.slice_index, layout.dtype)
            empty = torch.empty(layout.num_elements, dtype=layout.dtype)
            whole = copies.setdefault(key, {}).setdefault(holding.replica, empty)
            if holding.rank == fabric.rank:
                store = rank.interpreter.store.units[holding.unit]
                whole[low:high].copy_(flat_weights(store, layout, low, high))
            if len(everyone) > 1 and high > low:
                label = f"gather weight{format_unit(holding.unit)}"
                fabric.broadcast(label, whole[low:high], everyone, holding.rank).wait()
    return dict(_assembled(book, {key: model_of(found, book.center) for key, found in copies.items()}))


def model_of(copies: Mapping[int, Tensor], center: int | None) -> Tensor:
    """Return what the model has, of what each replica has: the mean, or what the center has where there is one."""
    return mean_of(list(copies.values())) if center is None else copies[center]


def mean_of(copies: Sequence[Tensor]) -> Tensor:
    """Return the mean of what replicas have, added up in float64; of what is no fraction, the first replica's."""
    if len(copies) == 1 or not copies[0].is_floating_point():
        return copies[0]
    total = copies[0].double()
    for copy in copies[1:]:
        total = total + copy.double()
    return (total / len(copies)).to(copies[0].dtype)


def _assembled(
    book: Book, flats: Mapping[tuple[tuple[int, ...], int, torch.dtype], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    sliced = slices_of(book.parts.spec)
    for unit in book.parts.spec.units:
        for layout in book.layouts(unit):
            for slot in layout.slots:
                dim, count = sliced.get(slot.name, (0, 1))
                local = [
                    flats[unit, index, layout.dtype][slot.start : slot.stop].view(slot.shape) for index in range(count)
                ]
                yield slot.name, torch.cat(local, dim=dim) if count > 1 else local[0].clone()


def has_everything(book: Book) -> bool:
    """Tell whether every rank has all weights as they are, so that nothing has to be gathered.

    Ranks do which update whole units, or have a unit in common with others who do; not those with slices or servers.
    """
    parts = book.parts
    if (
        book.num_replicas > 1
        or slices_of(parts.spec)
        or any(isinstance(word, Serve) for _, word in parts.program.words())
    ):
        return False
    for rank, row in enumerate(parts.program.rows):
        roles = roles_of(rank, row.body, parts.spec)
        if any(unit not in roles or not roles[unit].is_up_to_date for unit in parts.spec.units):
            return False
    return True


def spread_weights(book: Book, rank: Rank, fabric: Fabric) -> None:
    """Bring every rank's weights up to date with those that answer for them; all ranks call it together."""
    full = gather_weights(book, rank, fabric)
    write_weights(book, rank, lambda name: full[name])


def write_weights(book: Book, rank: Rank, read: Callable[[str], Tensor]) -> None:
    """Put full parameters, read by name, into whatever part of them this rank holds."""
    row = book.parts.program.rows[rank.interpreter.fabric.rank]
    sliced = slices_of(book.parts.spec)
    for store in rank.interpreter.store.units.values():
        for name, param in store.params.items():
            local = slice_of(read(name), sliced.get(name), (row.slice_index, row.num_slices))
            arena = next((arena for arena in store.arenas if name in arena.params), None)
            if arena is None:
                param.data.copy_(local)
            else:
                arena.put(name, local)


def settle_buffers(rank: Rank, fabric: Fabric, model_buffers: Sequence[str], num_micros: Mapping[str, int]) -> None:
    """Replace floating-point buffers by their mean over the ranks that ran their block, weighted by microbatches.

    Running statistics are moving averages, and averaging is linear: the mean of what the replicas have at the
    end is what replicas that average after every step would have.

    Args:
        rank: this rank.
        fabric: its way to the others.
        model_buffers: names of all buffers, in the same order on all ranks.
        num_micros: for each buffer that this rank's row changes, how many microbatches change it in a step.
    """
    everyone = tuple(range(fabric.num_ranks))
    store = rank.interpreter.store
    for name in model_buffers:
        buffer = store.buffers[name]
        weight = float(num_micros.get(name, 0))
        if buffer.is_floating_point():
            total = torch.cat(
                [buffer.detach().reshape(-1).double() * weight, torch.tensor([weight], dtype=torch.float64)]
            )
            fabric.all_reduce(f"buffer {name}", total, everyone).wait()
            if float(total[-1]) > 0:
                buffer.copy_((total[:-1] / total[-1]).view(buffer.shape))
        else:
            counts = fabric.gather_values(f"buffer {name}", [weight, buffer.reshape(-1).tolist()], everyone)
            best = max(cast("list[tuple[float, list[int]]]", counts), key=lambda item: item[0])
            buffer.copy_(torch.tensor(best[1], dtype=buffer.dtype).view(buffer.shape))


@dataclass(frozen=True, slots=True)
class Target:
    """One tensor that an optimizer updates, and where it lies in its unit's arena."""

    optimizer: optim.Optimizer
    tensor: Tensor
    unit: tuple[int, ...]
    layout: Layout
    start: int
    stop: int

    def slots(self) -> list[tuple[Slot, int, int]]:
        """Return the parameters it covers, with the elements from and to."""
        spans = ((slot, max(slot.start, self.start), min(slot.stop, self.stop)) for slot in self.layout.slots)
        return [(slot, first, last) for slot, first, last in spans if first < last]


def targets_of(book: Book, rank: Rank) -> Iterator[Target]:
    """Yield every tensor that this rank's optimizers update."""
    store = rank.interpreter.store
    for run in rank.interpreter.update_runs():
        optimizer, tensors = store.optimizer(run)
        ranges = [
            (unit, *where)
            for unit in run
            for where in target_ranges(store.units[unit], book.layouts(unit), store.units[unit].role.span or WHOLE)
        ]
        for tensor, (unit, layout, start, stop) in zip(tensors, ranges, strict=True):
            assert optimizer is not None, "it updates a tensor"
            yield Target(optimizer, tensor, unit, layout, start, stop)


def target_ranges(store: UnitStore, layouts: Sequence[Layout], span: Span) -> list[tuple[Layout, int, int]]:
    """Return the range of each tensor that the optimizer updates for a unit, in its order."""
    if store.arenas:
        return [(layout, start, stop) for layout in layouts for _, start, stop in layout.updated(span)]
    slots = {slot.name: (layout, slot.start, slot.stop) for layout in layouts for slot in layout.slots}
    return [slots[name] for name in store.params]


def pieces_of(book: Book, rank: Rank) -> tuple[list[Piece], dict[str, dict[str, Json]]]:
    """Return what this rank writes into a checkpoint, and the optimizer's plain numbers by parameter."""
    me = rank.interpreter.fabric.rank
    mine = [holding for holding in book.holdings() if holding.rank == me]
    pieces = [piece for holding in mine for piece in _weight_pieces(book, rank, holding)]
    scalars: dict[str, dict[str, Json]] = {}
    index = book.parts.program.rows[me].slice_index
    for target in targets_of(book, rank):
        if target.unit not in {holding.unit for holding in mine}:
            continue
        for key, value in target.optimizer.state.get(target.tensor, {}).items():
            for slot, first, last in target.slots():
                name = f"{slot.name}{book.suffix(slot.name, index, book.replica_of(me))}"
                if is_plain_number(key, value, target.tensor):
                    scalars.setdefault(name, {})[key] = write_number(key, value)
                elif value.shape == target.tensor.shape:
                    part = value.reshape(-1)[first - target.start : last - target.start].contiguous()
                    pieces.append(Piece(f"optimizer.{key}:{name}", part, slot.shape, first - slot.start))
                else:  # of an optimizer that looks at whole tensors, so that the target is the whole parameter
                    pieces.append(whole(f"optimizer.{key}:{name}", value))
    return pieces, scalars


def is_plain_number(key: str, value: object, target: Tensor) -> bool:
    """Tell whether an entry of an optimizer's state is one number for all elements, as its step count is."""
    return not isinstance(value, Tensor) or (value.numel() == 1 and (key in ONE_FOR_ALL or target.numel() > 1))


def write_number(key: str, value: object) -> Json:
    """Return a plain number as JSON, a tensor's with its dtype; :func:`read_number` is its opposite.

    Raises:
        CheckpointError: the optimizer keeps something that is no number.
    """
    if isinstance(value, Tensor):
        return [value.item(), dtype_name(value.dtype)]
    if value is None or isinstance(value, int | float):
        return value
    raise CheckpointError(
        f"the optimizer keeps {key!r} as a {type(value).__name__}; a checkpoint holds tensors and numbers: "
        "keep it in one of these, or train without checkpoints"
    )


def read_number(saved: Any) -> Any:  # noqa: ANN401 - JSON in, a number or a tensor of one out
    """Return what :func:`write_number` was given."""
    return torch.tensor(saved[0], dtype=torch_dtype(saved[1])) if isinstance(saved, list) else saved


def _weight_pieces(book: Book, rank: Rank, holding: Holding) -> Iterator[Piece]:
    store = rank.interpreter.store.units[holding.unit]
    for layout in book.layouts(holding.unit):
        low, high = layout.range_of(holding.span)
        flat = flat_weights(store, layout, low, high)
        for slot, start, stop in layout.within(holding.span):
            name = f"model:{slot.name}{book.suffix(slot.name, holding.slice_index, holding.replica)}"
            yield Piece(name, flat[start - low : stop - low].contiguous(), slot.shape, start - slot.start)


def restore_optimizers(
    book: Book,
    rank: Rank,
    keys: Sequence[str],
    read: Callable[[str, str], Tensor | None],
    scalars: Mapping[str, Mapping[str, Json]],
) -> None:
    """Put saved optimizer state into this rank's optimizers.

    Args:
        book: who answers for what.
        rank: this rank.
        keys: the names of the state's tensors, ``exp_avg`` for instance.
        read: returns a key's tensor for a parameter, in the parameter's full shape; None when there is none.
        scalars: the plain numbers by parameter.
    """
    for target in targets_of(book, rank):
        slots = target.slots()
        state: dict[str, Any] = {}
        for key in keys:
            fulls = [full for slot, _, _ in slots if (full := read(key, slot.name)) is not None]
            if fulls and len(fulls) == len(slots):
                state[key] = _saved_state(book, rank, fulls, target)
        for key, number in scalars.get(slots[0][0].name, {}).items():
            state[key] = read_number(number)
        target.optimizer.state[target.tensor] = state


def _saved_state(book: Book, rank: Rank, fulls: Sequence[Tensor], target: Target) -> Tensor:
    """Return a target's part of the state of the parameters that it covers; state of another shape is not cut."""
    row = book.parts.program.rows[rank.interpreter.fabric.rank]
    shapes = {param.name: param.shape for param in book.parts.spec.params}
    parts = []
    for full, (slot, first, last) in zip(fulls, target.slots(), strict=True):
        if tuple(full.shape) != shapes[slot.name]:
            return full
        local = slice_of(full, slices_of(book.parts.spec).get(slot.name), (row.slice_index, row.num_slices))
        parts.append(local.reshape(-1)[first - slot.start : last - slot.start])
    return torch.cat(parts).view(target.tensor.shape)


def frozen_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a model that are not trained."""
    return {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}
