"""An ``nn.Sequential`` as blocks of its children: run eagerly, whatever their code does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from counterpoint.cutting.cost import Meter
from counterpoint.cutting.cut import Cut, Seed, Segment, canonical_names, num_bytes, params_of
from counterpoint.cutting.eager import Inputs, Modes, call_of, num_samples, unmarked
from counterpoint.cutting.leaves import Nest, nest_of
from counterpoint.cutting.seeds import Seeding, children_of, is_plain_sequential, silent
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, ModelSpec, Piece
from counterpoint.model.values import INPUT, Made


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module keeps a tensor that is passed in for a call.

    Args:
        owner: the module's own table of parameters or buffers.
        key: the tensor's place in that table.
        name: the tensor's first name in the whole model.
    """

    owner: dict[str, Tensor | None]
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class Link:
    """One child of the chain.

    Args:
        path: the child's path.
        module: the child.
        params: the slots of its parameters.
        buffers: the slots of its buffers.
        recurrent: layers inside that keep a second list of their parameters.
    """

    path: str
    module: nn.Module
    params: tuple[Slot, ...]
    buffers: tuple[Slot, ...]
    recurrent: tuple[nn.RNNBase, ...]


@dataclass(frozen=True, slots=True)
class Seam:
    """What is known of the place before a piece, or behind the last.

    Args:
        nest: how the values are nested into the one that a chain passes on.
        num_calls: how often each seeded module was called before, in one forward.
        sizes: bytes per sample of each value, and whether it is of floating point.
        sample_bytes: bytes per sample of all of them.
    """

    nest: Nest
    num_calls: dict[str, int]
    sizes: tuple[tuple[int, bool], ...]
    sample_bytes: int


class ChainCut(Cut):
    """A ``Sequential`` cut between its children, nested ones included; nothing is traced.

    A child without parameters belongs to the block before it. The model is run once here to see its values.

    Args:
        model: a Sequential that has the forward of ``nn.Sequential``.
        inputs: an example of what it is called with.
        cuts: paths of children, nested ones included, with which a block begins whatever they hold.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, *, cuts: Sequence[str] = ()) -> None:
        if not is_plain_sequential(model):
            raise PlanError(
                f"{type(model).__name__} is not a chain of its children; a chain is an nn.Sequential with its own "
                "forward and without hooks; use GraphCut, which traces the model"
            )
        self.model = model
        self._modes = Modes(model)
        self._pieces = _pieces(model, cuts)
        self._example = inputs
        self._seams: dict[bool, tuple[Seam, ...]] = {}
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        self._seeding: Seeding | None = None
        seams, costs, draws = self._observe(training=True)
        self._seams[True] = seams
        self._seeding = Seeding(model, silent) if draws else None
        starts = _starts(model)
        blocks = tuple(
            Block((Piece(_name(links), _params(links), cost, seam.sample_bytes, starts=starts[links[0].path]),), index)
            for index, (links, cost, seam) in enumerate(zip(self._pieces, costs, seams[1:], strict=True))
        )
        super().__init__(ModelSpec(blocks, params_of(model), _values(seams)), draws=draws)

    def _observe(self, *, training: bool) -> tuple[tuple[Seam, ...], list[float], bool]:
        """Run the chain once; return its seams, the work of each piece per sample, and whether it draws."""
        (value,), _ = call_of(self._example)
        samples = num_samples(value)
        seeding = Seeding(self.model, silent)
        seams, costs, total = [_seam(value, seeding, samples)], [], 0
        with unmarked(self.model, training=training), Meter() as meter:
            for links in self._pieces:
                for link in links:
                    value = link.module(value)
                seams.append(_seam(value, seeding, samples))
                costs.append((meter.flops - total) / samples)
                total = meter.flops
        seeding.remove()
        return tuple(seams), costs, meter.draws

    def _seams_of(self, *, training: bool) -> tuple[Seam, ...]:
        if training not in self._seams:
            self._seams[training] = self._observe(training=training)[0]
        return self._seams[training]

    def segment(self, first_piece: int, stop_piece: int, *, training: bool) -> Segment:
        """Return the children of the pieces as one function."""
        key = (first_piece, stop_piece, training)
        if key not in self._segments:
            self._segments[key] = self._make(first_piece, stop_piece, training=training)
        return self._segments[key]

    def _make(self, first_piece: int, stop_piece: int, *, training: bool) -> Segment:
        seams = self._seams_of(training=training)
        before, behind = seams[first_piece], seams[stop_piece]
        links = tuple(link for piece in self._pieces[first_piece:stop_piece] for link in piece)
        param_slots = tuple(slot for link in links for slot in link.params)
        buffer_slots = tuple(slot for link in links for slot in link.buffers)
        recurrent = tuple(layer for link in links for layer in link.recurrent)
        modules = tuple(link.module for link in links)
        model, seeding, modes = self.model, self._seeding, self._modes

        def run(
            values: Sequence[Tensor], params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], seed: Seed
        ) -> tuple[Tensor, ...]:
            """Run the modules with these parameters and buffers in place of their own, which are back afterwards."""
            if model.training is not training:
                modes.set(training=training)
            if seeding is not None:
                seeding.seed = seed
                seeding.calls.num_calls = dict(before.num_calls)
                if first_piece == 0:
                    seed(seeding.calls.next(""))
            own = _bind(param_slots, params), _bind(buffer_slots, buffers)
            _relist(recurrent)
            try:
                value = before.nest.unflatten(values)
                for module in modules:
                    value = module(value)
            finally:
                _unbind(param_slots, own[0])
                _unbind(buffer_slots, own[1])
                _relist(recurrent)
            return behind.nest.flatten(value)

        names = [tuple(dict.fromkeys(slot.name for slot in slots)) for slots in (param_slots, buffer_slots)]
        ends = [sum(len(seam.sizes) for seam in seams[:piece]) for piece in range(len(seams))]
        taken = tuple(range(ends[first_piece], ends[first_piece] + len(before.sizes)))
        given = tuple(range(ends[stop_piece], ends[stop_piece] + len(behind.sizes)))
        return Segment(taken, given if stop_piece < len(self._pieces) else (), names[0], names[1], run)

    def values(self, *, training: bool) -> tuple[Made, ...]:
        """Return what the children of each piece hand on to the next one."""
        return _values(self._seams_of(training=training))

    def flatten_inputs(self, inputs: Inputs, *, training: bool = True) -> tuple[Tensor, ...]:
        """Return the tensors of the one input."""
        (value,), _ = call_of(inputs)
        return self._seams_of(training=training)[0].nest.flatten(value)

    def unflatten_output(self, values: Sequence[Tensor], *, training: bool = True) -> Any:  # noqa: ANN401
        """Return what the last child gives."""
        return self._seams_of(training=training)[-1].nest.unflatten(values)


def _children(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a chain in the order they run, nested chains opened."""
    for name, child in children_of(module):
        inner = f"{path}.{name}" if path else name
        if is_plain_sequential(child):
            yield from _children(child, inner)
        else:
            yield inner, child


def chain_places(model: nn.Module) -> set[str]:
    """Return the paths at which a Sequential can be cut: those of its children, nested ones included."""
    return {place for places in _starts(model).values() for place in places}


def _starts(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return for each child of the chain the paths that begin with it: its own, and of chains around it."""
    starts: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for path, _ in _children(model):
        names = path.split(".")
        around = (".".join(names[:depth]) for depth in range(1, len(names) + 1))
        starts[path] = tuple(place for place in around if place not in seen)
        seen.update(starts[path])
    return starts


def _pieces(model: nn.Module, cuts: Sequence[str]) -> tuple[tuple[Link, ...], ...]:
    """Return the children in runs that each begin with a child that has parameters, or is named among the cuts."""
    starts = _starts(model)
    names = canonical_names(model)
    runs: list[list[Link]] = []
    for path, module in _children(model):
        link = _link(path, module, names)
        is_named = any(place in cuts for place in starts[path])
        if not runs or is_named or (link.params and any(earlier.params for earlier in runs[-1])):
            runs.append([])
        runs[-1].append(link)
    return tuple(tuple(run) for run in runs)


def _link(path: str, module: nn.Module, names: Mapping[str, str]) -> Link:
    tables: dict[str, list[Slot]] = {"_parameters": [], "_buffers": []}
    for inner, owner in module.named_modules(prefix=path):
        for table, slots in tables.items():
            own = vars(owner)[table]
            slots += [Slot(own, key, names[f"{inner}.{key}"]) for key, value in own.items() if value is not None]
    recurrent = tuple(layer for layer in module.modules() if isinstance(layer, nn.RNNBase))
    return Link(path, module, tuple(tables["_parameters"]), tuple(tables["_buffers"]), recurrent)


def _name(links: Sequence[Link]) -> str:
    owners = [link.path for link in links if link.params] or [links[0].path]
    return owners[0] if len(owners) == 1 else f"{owners[0]}..{owners[-1]}"


def _params(links: Sequence[Link]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for link in links for slot in link.params))


def _seam(value: Any, seeding: Seeding, samples: int) -> Seam:  # noqa: ANN401
    nest = nest_of(value)
    tensors = nest.flatten(value)
    sizes = tuple((num_bytes([tensor]) // samples, tensor.is_floating_point()) for tensor in tensors)
    return Seam(nest, dict(seeding.calls.num_calls), sizes, num_bytes(tensors) // samples)


def _values(seams: Sequence[Seam]) -> tuple[Made, ...]:
    """Return what each piece makes for the next one; what the last one makes is the output."""
    return tuple(
        Made(maker, (maker + 1,), size, is_float)
        for maker, seam in enumerate(seams[:-1], INPUT)
        for size, is_float in seam.sizes
    )


def _bind(slots: Sequence[Slot], tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """Put the tensors into their slots; return what was there."""
    own = [slot.owner[slot.key] for slot in slots]
    for slot in slots:
        slot.owner[slot.key] = tensors[slot.name]
    return own


def _unbind(slots: Sequence[Slot], own: Sequence[Tensor | None]) -> None:
    for slot, tensor in zip(slots, own, strict=True):
        slot.owner[slot.key] = tensor


def _relist(layers: Sequence[nn.RNNBase]) -> None:
    """Have recurrent layers use the parameters that are in their slots now."""
    for layer in layers:
        table = vars(layer)
        table["_flat_weights"] = [table["_parameters"][name] for name in table["_flat_weights_names"]]
