"""What ``torch.nn.SyncBatchNorm`` means in a plan: replicas normalize the microbatches that they run side by side.

Its statistics are needed in the middle of a forward, in an exchange that no word of the program shows: a function mode
that is active while blocks run (:mod:`counterpoint.runtime.normalizing`) sees the calls of batch norm that belong to
such modules, and has them meet those of the other replicas. That no rank waits for ever in one is proved by a walk of
the program, into which the meetings are put for that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from counterpoint.errors import PlanError, ProgramError
from counterpoint.fabric.fabric import Fabric, Group, Work
from counterpoint.program.instruction import Backward, Collective, Commit, Forward, Instruction, Recompute, Value
from counterpoint.program.program import Program, Row
from counterpoint.program.walk import walk
from counterpoint.runtime.store import Store

Seats: TypeAlias = tuple[tuple[int, int], ...]
"""The ranks that normalize together, each with the microbatch that it brings."""


@dataclass(frozen=True, slots=True)
class Norm:
    """One module that normalizes with those of other replicas.

    Args:
        path: of the module.
        mark: the parameter or buffer by which its calls are known.
        buffers: what it keeps of its batches; none if it keeps nothing.
        kind: what it is, for errors.
    """

    path: str
    mark: str
    buffers: tuple[str, ...]
    kind: str = "SyncBatchNorm"

    @property
    def instead(self) -> str:
        """What to do for each replica to normalize its own microbatches."""
        return "take BatchNorm" if self.kind == "SyncBatchNorm" else "leave batch_norm='sync' out"


def norms_of(model: nn.Module, *, every: bool = False) -> list[Norm]:
    """Return the modules of a model that normalize with those of other replicas.

    Args:
        model: any.
        every: whether all modules of batch norm do; otherwise those of SyncBatchNorm.

    Raises:
        PlanError: one has neither running statistics nor a weight, so that its calls cannot be told from others.
    """
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found = []
    wanted = nn.modules.batchnorm._BatchNorm if every else nn.SyncBatchNorm  # noqa: SLF001 - what all of them are
    for path, module in model.named_modules():
        if not isinstance(module, wanted):
            continue
        is_own = isinstance(module, nn.SyncBatchNorm)
        kind = "SyncBatchNorm" if is_own else f"{type(module).__name__} under batch_norm='sync'"
        own = [tensor for tensor in (module.running_mean, module.weight) if tensor is not None]
        if not own:
            raise PlanError(
                f"{path} is a {kind} with affine=False and track_running_stats=False, which has no tensor to know it "
                "by; leave one of the two at its default"
            )
        found.append(Norm(path, names[id(own[0])], tuple(names[id(buffer)] for buffer in module.buffers()), kind))
    return found


class Replicas:
    """The ranks that normalize together in one module; see :class:`counterpoint.runtime.norms.Union`.

    Args:
        fabric: the way to them.
        group: their ranks.
        path: of the module.
    """

    def __init__(self, fabric: Fabric, group: Group, path: str) -> None:
        self.fabric = fabric
        self.group = group
        self.path = path
        self.count = 0  # values by channel of everybody, once gathered

    def gather(self, row: Tensor) -> Tensor:
        """Return everybody's row."""
        rows = start_rows(self.fabric, self.group, f"statistics of {self.path}", row[0]).wait()
        self.count = int(rows[:, -1].sum())
        return rows

    def add(self, sums: Tensor) -> None:
        """Replace the tensor by its sum over everybody."""
        self.fabric.all_reduce(f"gradient of {self.path}", sums, self.group).wait()


class Rows:
    """Rows of a group's members, which are on their way.

    Args:
        whole: where they will be, one after the other.
        count: members.
        work: brings them; None where there is nothing to bring.
    """

    def __init__(self, whole: Tensor, count: int, work: Work | None) -> None:
        self._whole = whole
        self._count = count
        self._work = work

    def wait(self) -> Tensor:
        """Return all rows as ``(rank, number)``."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._whole.view(self._count, -1)


def start_rows(fabric: Fabric, group: Group, label: str, row: Tensor) -> Rows:
    """Begin to bring the rows ``(number,)`` of all members of a group to all of them, which call it together."""
    count, width = len(group), row.numel()
    whole = row.new_zeros(count * width)
    at = group.index(fabric.rank)
    whole[at * width : (at + 1) * width] = row
    bounds = range(0, (count + 1) * width, width)
    return Rows(whole, count, fabric.all_gather(label, whole, bounds, group) if count > 1 else None)


class Together:
    """How one rank's SyncBatchNorm modules meet those of other ranks.

    Args:
        norms: the modules.
        store: the rank's parameters and buffers.
        fabric: its way to the others.
        seats: who normalizes together, by block and microbatch of this rank.
    """

    def __init__(
        self, norms: Sequence[Norm], store: Store, fabric: Fabric, seats: Mapping[tuple[int, int], Seats]
    ) -> None:
        self.norms = norms
        self.store = store
        self.fabric = fabric
        self.seats = seats
        tensors: dict[str, Tensor] = {**store.params, **store.buffers}
        self.paths = {id(tensors[norm.mark]): norm.path for norm in norms if norm.mark in tensors}

    def group(self, block: int, micro: int, sizes: Mapping[int, int]) -> Group:
        """Return who meets while a microbatch goes through blocks: those that have samples; none if that is one."""
        group = tuple(rank for rank, theirs in self.seats.get((block, micro), ()) if sizes[theirs])
        return group if len(group) > 1 else ()

    def keep_up(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Give the running statistics to members without samples; all members call it after a forward, or instead.

        Args:
            names: of the buffers that the blocks may change.
            block: the first of them.
            micro: the microbatch that this rank brings.
            sizes: of every microbatch.
        """
        seats = self.seats.get((block, micro), ())
        roots = [rank for rank, theirs in seats if sizes[theirs]]
        kept = [name for norm in self.norms for name in norm.buffers if name in set(names)]
        if not kept or not roots or len(roots) == len(seats):
            return
        buffers = [self.store.buffers[name] for name in kept]
        flat = torch.cat([buffer.detach().reshape(-1).double() for buffer in buffers])
        group = tuple(rank for rank, _ in seats)
        self.fabric.broadcast(f"running statistics of block {block}", flat, group, roots[0]).wait()
        if self.fabric.rank in roots:
            return  # they have them, and a backward may still look at the very tensors
        begun = 0
        for buffer in buffers:
            buffer.copy_(flat[begun : begun + buffer.numel()].view(buffer.shape))
            begun += buffer.numel()


def seats_of(program: Program, rank: int) -> dict[tuple[int, int], Seats]:
    """Return who normalizes together with a rank, by its blocks and microbatches.

    Those are the ranks whose samples share one mean with this one's, and which hold the same slices: each brings the
    first microbatch that it runs, then the second one, and so on.
    """
    row = program.rows[rank]
    members = [other for other in mean_of(row, rank) if program.rows[other].slice_index == row.slice_index]
    micros = {other: forwards(program.rows[other].body) for other in members}
    return {
        (block, micro): tuple((other, micros[other][block][at]) for other in members if at < len(micros[other][block]))
        for block, own in micros[rank].items()
        for at, micro in enumerate(own)
    }


def mean_of(row: Row, rank: int) -> Group:
    """Return the ranks whose samples share one mean with a rank's."""
    commit = next((word for word in row.body if isinstance(word, Commit)), Commit((rank,)))
    return commit.own or commit.group


def forwards(words: Sequence[Instruction]) -> defaultdict[int, list[int]]:
    """Return the microbatches that each block runs on, in order."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for word in words:
        if isinstance(word, Forward):
            found[word.block].append(word.micro)
    return found


def require_alone(program: Program, norms: Sequence[Norm]) -> None:
    """Check that nobody has to normalize together with other ranks in the body of a stream.

    Raises:
        PlanError: somebody has.
    """
    for rank, row in enumerate(program.rows):
        if len(mean_of(row, rank)) > row.num_slices:
            raise PlanError(
                f"{norms[0].path} is a {norms[0].kind}, which replicas normalize together, but those of a stage do not "
                f"meet in the middle of a forward in a pipeline without a flush; {norms[0].instead}, so that each "
                "normalizes its own microbatches, or take order=one_f_one_b"
            )


def require_one_forward(program: Program, norms: Sequence[Norm]) -> None:
    """Check that replicas which normalize together do not have to meet again where one recomputes.

    Raises:
        PlanError: they would.
    """
    for rank, row in enumerate(program.rows):
        again = {(word.block, word.micro) for word in row.body if isinstance(word, Recompute)}
        seats = seats_of(program, rank) if again else {}
        if any(len(seats.get(place, ())) > 1 for place in again):
            raise PlanError(
                f"{norms[0].path} is a {norms[0].kind}, which replicas normalize together, and rank {rank} computes "
                f"its block again at a time of its own; {norms[0].instead}, so that each normalizes its own "
                "microbatches, or give recompute=never"
            )


def require_meetings(program: Program, norms: Sequence[Norm]) -> None:
    """Prove that replicas which meet in every block, forwards and backwards, never wait for ever.

    Raises:
        PlanError: they might.
    """
    rows = []
    for rank, row in enumerate(program.rows):
        seats, words = seats_of(program, rank), list[Instruction]()
        counts: Counter[tuple[type, int]] = Counter()
        for word in row.body:
            words.append(word)
            if isinstance(word, Forward | Backward):
                at = counts[type(word), word.block]
                counts[type(word), word.block] += 1
                group = tuple(member for member, _ in seats.get((word.block, word.micro), ()))
                value = Value("y" if isinstance(word, Forward) else "dx", (word.block,), at)
                words += [Collective("all_reduce", value, group)] if len(group) > 1 else []
        rows.append(tuple(words))
    try:
        for _ in walk(rows):
            pass
    except ProgramError as error:
        raise PlanError(
            f"{norms[0].path} is a {norms[0].kind}, in which replicas wait for each other, but in this plan they would "
            "wait for ever, because they run their microbatches in different orders; give all stages as many replicas "
            f"(pipeline(p) * data(r)), or {norms[0].instead}"
        ) from error
