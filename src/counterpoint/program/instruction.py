"""The instruction set: everything one rank can be told to do.

Instructions are frozen and hold only ints, strings and tuples of them; they can be printed, compared, hashed
and simulated. Each is one word of text, given in its docstring; :mod:`counterpoint.program.text` reads and
writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Group: TypeAlias = tuple[int, ...]
"""Ranks that act together, in ascending order."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """What a message, a collective or a release is about.

    ==========  =============================================  =============
    name        meaning                                        text
    ==========  =============================================  =============
    ``x``       what enters a block, for one microbatch        ``x3.0``
    ``g``       gradient of what leaves a block                ``g3.0``
    ``s``       what a block makes for blocks further on       ``s2+7.0``
    ``ds``      gradient of that                               ``ds2+7.0``
    ``y``       partial output of a sliced block               ``y3.0``
    ``dx``      partial input gradient of a sliced block       ``dx3.0``
    ``grad``    gradient of the parameters of a unit           ``grad3``, ``grad0+4``
    ``late``    gradient of a unit, set aside for a step       ``delayed_grad3``
    ``weight``  parameters of a unit                           ``weight3``
    ==========  =============================================  =============

    Args:
        name: one of the names above.
        blocks: the block, or all blocks of a unit; of ``s`` and ``ds`` the block that makes it and those that read it.
        micro: the microbatch of a value that has one, else None.
    """

    name: Literal["x", "g", "s", "ds", "y", "dx", "grad", "delayed_grad", "weight"]
    blocks: tuple[int, ...]
    micro: int | None = None


ACTIVATIONS: frozenset[str] = frozenset({"x", "s"})
"""The names of values that blocks make for others."""
ACTIVATION_GRADS: frozenset[str] = frozenset({"g", "ds"})
"""The names of their gradients."""
UNIT_TENSORS: frozenset[str] = frozenset({"grad", "delayed_grad", "weight"})
"""The names of values that belong to a unit and not to a microbatch."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Run one block forward on one microbatch. Text: ``F3.0``, or ``F3.0:-1`` for an older version.

    Args:
        block: which block.
        micro: which microbatch of the global batch.
        version: which parameters it reads: 0 for those after the newest update of this row, -1 for the ones before.
    """

    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run one block forward again, for its backward. Text: ``R3.0``, or ``R3.0:-1`` as its backward has it.

    The forward of the same block and microbatch has kept only what it read, and buffers stay as that forward has left
    them.

    Args:
        block: which block.
        micro: which microbatch of the global batch.
        version: which parameters its forward has read, as there.
    """

    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Run one block backward on one microbatch and add to its gradients. Text: ``B3.0``, ``B3.0:-1``.

    It may come in two parts: ``Bi3.0`` makes the gradient of what enters the block, ``Bw3.0`` those of its weights,
    later. What the forward keeps is kept until then.

    Args:
        block: which block.
        micro: which microbatch of the global batch.
        version: which parameters its forward has read, as there.
        part: ``""`` for all of it, ``input`` or ``weight``.
    """

    block: int
    micro: int
    version: int = 0
    part: Literal["", "input", "weight"] = ""

    @property
    def computes_input_grad(self) -> bool:
        """Whether the gradient of what enters the block is made."""
        return self.part != "weight"

    @property
    def computes_weight_grad(self) -> bool:
        """Whether the gradients of the block's weights are complete after it."""
        return self.part != "input"


@dataclass(frozen=True, slots=True)
class Commit:
    """Agree on the step: are all gradients finite, what is their norm, what was the loss. Text: ``commit@0,1``.

    After it every member applies the same updates with the same clipping, or skips them all. Text
    ``commit@0-3:0,1``: all four agree on whether the step counts, but this member's gradient is that of the mean over
    the samples of 0 and 1, and is clipped by the norm of theirs.

    Args:
        group: who decides together.
        own: whose samples share one mean with this member's; empty for those of the whole group.
    """

    group: Group
    loss_group: Group = ()


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the optimizer to the part of a unit whose gradient this rank holds; clear it. Text: ``U3``, ``U0+4``."""

    unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapGradBuffers:
    """Exchange the gradient of a unit with the one set aside a step ago, if there is one. Text: ``swap_grad_buffers(grad3)``.

    What was ``grad3`` is ``delayed_grad3`` from then on, and may be summed while the next gradient is being computed.
    """

    unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a value to a peer without waiting for it. Text: ``x3.0>1``, or ``grad3:int8>1`` for a gradient in a code.

    What a code does not send stays here, and is added to the next gradient that goes the same way.
    """

    tensor: TensorRef
    peer: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a value from a peer; a received gradient is added to the own one. Text: ``x3.0<0``, ``grad3:int8<0``."""

    tensor: TensorRef
    peer: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """Combine a value over a group. Text: ``all_reduce(grad3)@0,1``, split in two ``all_reduce_start(grad3)@0,1`` and ``all_reduce_wait(grad3)@0,1``.

    A sum of gradients may travel in a code (:mod:`counterpoint.program.compression`), ``all_reduce:int8(grad3)@0,1``; its result is
    then the sum of what the members' gradients have become in it.

    =========  ==============  ====================================================
    verb       standard name   afterwards
    =========  ==============  ====================================================
    ``sum``    all-reduce      every member holds the sum of all
    ``share``  reduce-scatter  member i of n holds the i-th part of the sum
    ``join``   all-gather      every member holds the parts of all
    ``copy``   broadcast       every member holds what the first member held
    ``mean``   all-reduce      every member holds the mean of all, each counted alike
    =========  ==============  ====================================================

    Args:
        verb: what is done.
        value: to what.
        group: by whom.
        phase: ``""`` does it, ``"start"`` starts it and never waits, ``"wait"`` waits for the one started.
        code: how a gradient is written on the way; ``""`` for as it is.
    """

    op: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_reduce_mean"]
    tensor: TensorRef
    group: Group
    phase: Literal["", "start", "wait"] = ""
    codec: str = ""

    @property
    def op_name(self) -> str:
        """The verb with its code, as in the text."""
        return f"{self.op}:{self.codec}" if self.codec else self.op


@dataclass(frozen=True, slots=True)
class Push:
    """Give a gradient to a server, which applies it when it comes. Text: ``push(grad3)>2``, ``push:int8(grad3)>2``.

    ``push(weight3)>2`` gives weights to a server that draws them and its own together. ``push_no_reply(grad3)>2`` is a push
    without an answer.

    Args:
        value: a gradient or weights.
        peer: the server.
        code: how a gradient is written on the way; ``""`` for as it is.
        verb: ``push`` is answered, and a pull waits for that; ``tell`` is not.
    """

    tensor: TensorRef
    peer: int
    codec: str = ""
    op: Literal["push", "push_no_reply"] = "push"

    @property
    def op_name(self) -> str:
        """The verb with its code, as in the text."""
        return f"{self.op}:{self.codec}" if self.codec else self.op


@dataclass(frozen=True, slots=True)
class Pull:
    """Wait for the server's parameters, which have seen the last push of this rank. Text: ``pull(weight3)<2``."""

    tensor: TensorRef
    peer: int


@dataclass(frozen=True, slots=True)
class ApplyPushes:
    """Take as many pushes of every unit as there are workers, in the order they come, and answer each.

    Text: ``apply_and_reply(0,1,0+4)@0,1``. Every push becomes one update of its own. ``apply_and_reply:2(0)@0,1`` answers a worker only
    while it has pushed a unit at most twice more often than the worker that has pushed it least; until then it waits.

    =========  ============================================================================================
    verb       what is done with each push
    =========  ============================================================================================
    ``serve``  its gradient is applied, and the weights go back
    ``take``   its gradient is applied
    ``draw``   its weights and those here move towards each other, ``elastic_average:0.25(0)@0,1`` each by a quarter of
               the way, and its own go back
    =========  ============================================================================================

    Args:
        units: the units that this server keeps.
        workers: the ranks that push to it.
        staleness: how many pushes ahead of the slowest a worker may be when it is answered; None for any number.
        verb: what is done with each push.
        part: of a draw, which part of the way, in digits.
    """

    units: tuple[tuple[int, ...], ...]
    workers: Group
    staleness: int | None = None
    op: Literal["apply_and_reply", "apply", "elastic_average"] = "apply_and_reply"
    alpha: str = ""

    @property
    def op_name(self) -> str:
        """The verb with its number, as in the text."""
        number = self.alpha if self.staleness is None else str(self.staleness)
        return f"{self.op}:{number}" if number else self.op

    @property
    def replies(self) -> bool:
        """Whether a push is answered with weights."""
        return self.op != "apply"

    @property
    def applies_gradients(self) -> bool:
        """Whether a push is a gradient that the optimizer applies."""
        return self.op != "elastic_average"


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a value that was gathered or is no longer needed. Text: ``free(weight3)``."""

    tensor: TensorRef


Compute: TypeAlias = Forward | Recompute | Backward
Instruction: TypeAlias = (
    Forward
    | Recompute
    | Backward
    | Commit
    | Update
    | SwapGradBuffers
    | Send
    | Recv
    | Collective
    | Push
    | Pull
    | ApplyPushes
    | Free
)


def grad(unit: tuple[int, ...]) -> TensorRef:
    """Return the gradient of a unit."""
    return TensorRef("grad", unit)


def delayed_grad(unit: tuple[int, ...]) -> TensorRef:
    """Return the gradient of a unit that was set aside a step ago."""
    return TensorRef("delayed_grad", unit)


def weight(unit: tuple[int, ...]) -> TensorRef:
    """Return the parameters of a unit."""
    return TensorRef("weight", unit)
