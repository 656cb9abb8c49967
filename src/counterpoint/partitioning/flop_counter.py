"""Count the FLOPs of a forward from the operators that reach the dispatcher; free on fake tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from counterpoint.partitioning.fx_ops import call_draws

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_RNN = "mkldnn_rnn_layer"
_PRODUCTS = {_ATTENTION, f"{_ATTENTION}_backward", _RNN}
"""Matrix products that torch counts no FLOPs of."""
_VIEWS = {"_unsafe_view", "alias"}


class OpCost(NamedTuple):
    """One operator call.

    Args:
        flops: its floating point operations.
        moved_bytes: the bytes of all that it read and wrote.
        dtype: that it computes in, as a :class:`counterpoint.world.cluster.Roofline` names it; ``tf32`` for products of
            float32 if torch is set to that.
        is_product: whether it is a matrix product, a convolution or attention.
    """

    flops: int
    moved_bytes: int
    dtype: str = "fp32"
    is_product: bool = False


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
            is_product = func.overloadpacket in flop_registry or func.overloadpacket.__name__ in _PRODUCTS
            dtype = _compute_dtype((args, kwargs, out), is_product=is_product)
            self.op_costs.append(OpCost(flops, _count_bytes((args, kwargs, out)), dtype, is_product))
        return out


def _compute_dtype(values: Any, *, is_product: bool) -> str:  # noqa: ANN401
    """Return the name of the dtype that an operator computes in: that of its first floating-point tensor."""
    floats = (leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    name = cluster_dtype(next(floats, torch.float32))
    return "tf32" if is_product and name == "fp32" and torch.get_float32_matmul_precision() != "highest" else name


def cluster_dtype(dtype: torch.dtype) -> str:
    """Return the name of a floating-point dtype in :data:`counterpoint.world.cluster.DTYPES`.

    Example:
        >>> cluster_dtype(torch.bfloat16), cluster_dtype(torch.float8_e4m3fn)
        ('bf16', 'fp8')
    """
    return {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
        dtype, "fp8" if dtype.itemsize == 1 else "fp32"
    )


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
