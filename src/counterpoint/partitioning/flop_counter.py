"""Count the FLOPs of a forward from the operators that reach the dispatcher; free on fake tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from counterpoint.partitioning.fx_ops import call_draws

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RNN = "mkldnn_rnn_layer"
_VIEWS = {"_unsafe_view", "alias"}


class OpCost(NamedTuple):
    """One operator call: its FLOPs, and the bytes of all that it read and wrote."""

    flops: int
    moved_bytes: int


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators run inside it: matmuls, convolutions and attention exactly, others one FLOP per element.

    Args:
        flops: FLOPs so far; a multiply and an add are two.
        uses_rng: whether an operator drew random numbers.
        op_costs: each operator call that is not a view.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.uses_rng = False
        self.op_costs: list[OpCost] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: with True, torch would import its compiler to disable it here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operator and count it, or the operators that it decomposes into."""
        kwargs = kwargs or {}
        self.uses_rng |= call_draws(func, args, kwargs)
        if func.overloadpacket not in flop_registry and func.namespace == "aten":
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        flops = _count_flops(func, args, kwargs, out)
        self.flops += flops
        if not func.is_view and func.overloadpacket.__name__ not in _VIEWS and _count_bytes(out):
            self.op_costs.append(OpCost(flops, _count_bytes((args, kwargs, out))))
        return out


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:  # noqa: ANN401
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet.__name__ == _ATTENTION:
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    if packet.__name__ == f"{_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))  # type: ignore[no-untyped-call]
    if packet.__name__ == _RNN:
        return int(2 * args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel()))
    if func.is_view:
        return 0
    return sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))


def _count_bytes(values: Any) -> int:  # noqa: ANN401
    """Return the bytes of tensors, each counted once."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())
