"""The instruction set: everything that one rank of a program can execute.

Instructions are frozen and hold only ints, strings and tuples of them, so that programs can be printed, compared,
hashed and simulated without tensors. The docstring of each class gives its text form; :mod:`counterpoint.program.text`
formats and parses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Group: TypeAlias = tuple[int, ...]
"""Ranks that act together, in ascending order."""

OffloadPlace: TypeAlias = Literal["disk", "host"]
"""Where tensors are offloaded to, a file or the memory of the host of a device."""

ALPHA_PATTERN = r"0\.[0-9]{1,40}"
"""Regular expression for the moving rate of an elastic average, see :class:`ApplyPushes`."""


HeldAs: TypeAlias = Literal[
    "weight",
    "gathered_weight",
    "cast",
    "gathered_cast",
    "master_weight",
    "grad",
    "reduced_grad",
    "delayed_grad",
    "copied_grad",
    "state",
]
"""Names of what a rank holds or sends of the parameters of a unit."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Name of the tensor that a message, a collective or a :class:`Free` refers to.

    ================  ====================================================  =================
    name              meaning                                               text
    ================  ====================================================  =================
    ``x``             input of a block, for one microbatch                  ``x3.0``
    ``g``             gradient of a block's output                          ``g3.0``
    ``s``             skip connection: an output read by later blocks       ``s2+7.0``
    ``ds``            gradient of a skip connection                         ``ds2+7.0``
    ``y``             partial output of a tensor-parallel block             ``y3.0``
    ``dx``            partial input gradient of a tensor-parallel block     ``dx3.0``
    ``out``           outputs of the last block for all microbatches        ``out3``
    ``grad``          gradient of the parameters of a unit                  ``grad3``, ``grad0+4``
    ``delayed_grad``  gradient of a unit that is applied one step late      ``delayed_grad3``
    ``weight``        parameters of a unit                                  ``weight3``
    ``state``         state of the optimizer for a unit, with the master    ``state3``
                      weights of its casts
    ================  ====================================================  =================

    No instruction names the rest, whose sizes are counted: of a unit, ``gathered_weight`` (what ranks gather of
    weights that they free after use), ``cast`` (the casts that the model reads instead of weights), ``gathered_cast``
    (likewise, of what was gathered), ``master_weight`` (the weights that an optimizer updates), ``reduced_grad`` (what
    ranks sum of a gradient, which may be a cast), ``copied_grad`` (the gradients of casts, before they are copied to
    the flat one) and ``state`` (of the optimizer, with master weights).

    Args:
        name: one of the names above.
        blocks: the block, or all blocks of a unit; for ``s`` and ``ds`` the producing block, then the consuming blocks.
        micro: index of the microbatch; None for the tensors of a unit, and for ``out``.
    """

    name: Literal["x", "g", "s", "ds", "y", "dx", "out"] | HeldAs
    blocks: tuple[int, ...]
    micro: int | None = None


ACTIVATIONS: frozenset[str] = frozenset({"x", "s"})
"""Names of the activations that one block passes to another."""
ACTIVATION_GRADS: frozenset[str] = frozenset({"g", "ds"})
"""Names of the gradients of these activations."""
UNIT_TENSORS: frozenset[str] = frozenset({"grad", "delayed_grad", "weight"})
"""Names of the tensors that belong to a unit instead of a microbatch."""
UNIT_SIZES: frozenset[HeldAs] = frozenset(get_args(HeldAs))
"""All names of :data:`HeldAs`."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward of one block on one microbatch. Text: ``F3.0``, or ``F3.0:-1`` with an older weight version.

    Args:
        block: index of the block.
        micro: index of the microbatch in the global batch.
        version: weight version to read, relative to this rank's newest update: 0 is the newest, -1 the one before it.
    """

    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run the forward of one block again before its backward (activation checkpointing). Text: ``R3.0``, ``R3.0:-1``.

    The original forward of the same block and microbatch saved only its inputs. Buffers keep the state that the
    original forward left.

    Args:
        block: index of the block.
        micro: index of the microbatch in the global batch.
        version: weight version that the original forward read.
    """

    block: int
    micro: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of one block on one microbatch and accumulate its gradients. Text: ``B3.0``, ``B3.0:-1``.

    A backward may be split in two: ``Bi3.0`` computes the input gradient, and a later ``Bw3.0`` the weight gradients.
    The saved activations are kept until the second one.

    Args:
        block: index of the block.
        micro: index of the microbatch in the global batch.
        version: weight version that the forward read.
        part: ``""`` for the whole backward, ``input`` or ``weight`` for one half of it.
    """

    block: int
    micro: int
    version: int = 0
    part: Literal["", "input", "weight"] = ""

    @property
    def computes_input_grad(self) -> bool:
        """Whether this instruction computes the gradient of the block's input."""
        return self.part != "weight"

    @property
    def computes_weight_grad(self) -> bool:
        """Whether the gradients of the block's weights are complete after this instruction."""
        return self.part != "input"


@dataclass(frozen=True, slots=True)
class Commit:
    """Agree on the outcome of the step: finite gradients, gradient norm, loss. Text: ``commit@0,1``.

    Afterwards every member applies the same updates with the same clipping factor, or all of them skip the step. In
    ``commit@0-3:0,1`` four ranks agree on whether the step is applied, but this member averages the loss over the
    samples of ranks 0 and 1 only and clips by the gradient norm of these two.

    Args:
        group: the ranks that agree.
        loss_group: the ranks over whose samples this member's loss is averaged, and whose gradients are clipped
            together with its own; empty for the whole group.
    """

    group: Group
    loss_group: Group = ()


@dataclass(frozen=True, slots=True)
class Update:
    """Apply the optimizer to the shard of a unit whose gradient this rank holds; clear it. Text: ``U3``, ``U0+4``."""

    unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapGradBuffers:
    """Swap the gradient of a unit with its delayed gradient (double buffering). Text: ``swap_grad_buffers(grad3)``.

    What was ``grad3`` becomes ``delayed_grad3``, and can be reduced while the next gradient is being computed.
    """

    unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor to a peer without waiting for it. Text: ``x3.0>1``, or ``grad3:int8>1`` for a compressed gradient.

    What the codec drops stays on this rank as error feedback for the next gradient sent to the same peer.
    """

    tensor: TensorRef
    peer: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a tensor from a peer; a gradient is added to the local one. Text: ``x3.0<0``, ``grad3:int8<0``."""

    tensor: TensorRef
    peer: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """Run a collective operation on a tensor. Text: ``all_reduce(grad3)@0,1``.

    A collective can be split into a start that does not block, ``all_reduce_start(grad3)@0,1``, and a wait,
    ``all_reduce_wait(grad3)@0,1``. An all-reduce of gradients can be compressed
    (:mod:`counterpoint.program.compression`), ``all_reduce:int8(grad3)@0,1``; its result is the sum of the members'
    decoded gradients. So is that of a reduce-scatter, ``reduce_scatter:int4(grad3)@0,1``, without error feedback. After
    ``all_gather:int8(weight3)@0,1`` every member has the decoded weights, and its shard as it was. After
    ``all_gather(out3)@0,1`` every member has the outputs and targets of all microbatches; it evaluates the loss on
    them, and has its gradient with respect to the outputs of its own microbatches.

    ===================  =================================================
    operation            result
    ===================  =================================================
    ``all_reduce``       every member holds the sum
    ``reduce_scatter``   member i of n holds the i-th shard of the sum
    ``all_gather``       every member holds the shards of all
    ``broadcast``        every member holds what the first member held
    ``all_reduce_mean``  every member holds the mean, equally weighted
    ===================  =================================================

    Args:
        op: the operation.
        tensor: its operand.
        group: the participating ranks.
        phase: ``""`` for the whole operation, ``start`` to launch it without blocking, ``wait`` to wait for the
            launched one. The rows of sparse gradients are gathered at the wait, where all members must be for it.
        codec: compression codec of a gradient, or of gathered weights; ``""`` for none.
    """

    op: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_reduce_mean"]
    tensor: TensorRef
    group: Group
    phase: Literal["", "start", "wait"] = ""
    codec: str = ""

    @property
    def op_name(self) -> str:
        """The operation with its codec, as in the text form."""
        return f"{self.op}:{self.codec}" if self.codec else self.op


@dataclass(frozen=True, slots=True)
class Push:
    """Push a gradient to a parameter server. Text: ``push(grad3)>2``, ``push:int8(grad3)>2``.

    ``push(weight3)>2`` pushes weights to a server that averages them with its own (elastic averaging).
    ``push_no_reply(grad3)>2`` is a push that the server does not answer.

    Args:
        tensor: a gradient or weights.
        peer: rank of the server.
        codec: compression codec of a gradient; ``""`` for none.
        op: ``push`` is answered, and a :class:`Pull` waits for the answer; ``push_no_reply`` is not.
    """

    tensor: TensorRef
    peer: int
    codec: str = ""
    op: Literal["push", "push_no_reply"] = "push"

    @property
    def op_name(self) -> str:
        """The operation with its codec, as in the text form."""
        return f"{self.op}:{self.codec}" if self.codec else self.op


@dataclass(frozen=True, slots=True)
class Pull:
    """Wait for the parameters that a server sends in answer to this rank's last push. Text: ``pull(weight3)<2``."""

    tensor: TensorRef
    peer: int


@dataclass(frozen=True, slots=True)
class ApplyPushes:
    """Serve one push of every unit from every worker, in order of arrival. Text: ``apply_and_reply(0,1,0+4)@0,1``.

    Every push is applied as an update of its own. ``apply_and_reply:2(0)@0,1`` bounds the staleness: a worker gets its
    answer only while it is at most two pushes ahead of the slowest worker.

    ===================  ============================================================================================
    operation            effect of each push
    ===================  ============================================================================================
    ``apply_and_reply``  the optimizer applies its gradient, and the new weights are sent back
    ``apply``            the optimizer applies its gradient
    ``elastic_average``  its weights and the server's move towards each other by a fraction alpha of their difference
                         (``elastic_average:0.25(0)@0,1``), and the worker gets its moved weights back
    ===================  ============================================================================================

    Args:
        units: the units that this server owns.
        workers: the ranks that push to it.
        staleness: how many pushes a worker may be ahead of the slowest one when it is answered; None for no bound.
        op: one of the operations above.
        alpha: of ``elastic_average``, the moving rate, as decimal digits.
    """

    units: tuple[tuple[int, ...], ...]
    workers: Group
    staleness: int | None = None
    op: Literal["apply_and_reply", "apply", "elastic_average"] = "apply_and_reply"
    alpha: str = ""

    @property
    def op_name(self) -> str:
        """The operation with its staleness or moving rate, as in the text form."""
        number = self.alpha if self.staleness is None else str(self.staleness)
        return f"{self.op}:{number}" if number else self.op

    @property
    def replies(self) -> bool:
        """Whether each push is answered with weights."""
        return self.op != "apply"

    @property
    def applies_gradients(self) -> bool:
        """Whether the pushes are gradients, which the optimizer applies."""
        return self.op != "elastic_average"


@dataclass(frozen=True, slots=True)
class Free:
    """Free a tensor that was gathered or is no longer needed (FSDP: reshard). Text: ``free(weight3)``.

    A rank that frees the input of a block, ``free(x3.0)``, and gathers it later, ``all_gather(x3.0)@0,1``, keeps its
    part of it: the i-th of n equal parts of its bytes, if it is the i-th of n members.
    """

    tensor: TensorRef


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to read state or weights of a unit, or a block's input, from elsewhere. Text: ``fetch(state3)<disk``.

    The state is read in chunks, through buffers: the update of the unit waits for one chunk after the other, updates
    it, and gives it to the :class:`Offload` that follows. State in host memory, ``fetch(state3)<host``, stays there,
    and the update runs there: gradients and weights are copied to it. The rank's shard of weights,
    ``fetch(weight3)<disk``, is read whole, and the gather or the update of the unit waits for it; a gather copies it,
    and gives up its memory. The input of a block, ``fetch(x3.0)<disk``, is read whole, and the recomputation of the
    block waits for it.

    Args:
        tensor: the state of a unit, its weights, or the input of a block.
        place: where it was offloaded to.
    """

    tensor: TensorRef
    place: OffloadPlace


@dataclass(frozen=True, slots=True)
class Offload:
    """Wait until the optimizer state of a unit is written and its buffers are free. Text: ``offload(state3)>disk``.

    With ``offload(state3)>host`` the updated weights are on the device again. After ``offload(weight3)>disk`` the
    rank's shard of weights, which the update has started to write, is written, and has no memory. The input of a block,
    ``offload(x3.0)>disk``, starts to be written, once the input before it is.

    Args:
        tensor: the state of a unit, its weights, or the input of a block.
        place: where it stays until it is fetched.
    """

    tensor: TensorRef
    place: OffloadPlace


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
    | Fetch
    | Offload
)


def grad(unit: tuple[int, ...]) -> TensorRef:
    """Return a reference to the gradient of a unit."""
    return TensorRef("grad", unit)


def delayed_grad(unit: tuple[int, ...]) -> TensorRef:
    """Return a reference to the delayed gradient of a unit."""
    return TensorRef("delayed_grad", unit)


def weight(unit: tuple[int, ...]) -> TensorRef:
    """Return a reference to the parameters of a unit."""
    return TensorRef("weight", unit)


def state(unit: tuple[int, ...]) -> TensorRef:
    """Return a reference to the optimizer state of a unit."""
    return TensorRef("state", unit)
