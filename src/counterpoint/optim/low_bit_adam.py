"""Adam and AdamW that keep their state in 8 bits or in bf16.

The arithmetic is that of torch's Adam in float32: a step reads the two means, exp_avg and exp_avg_sq, as float32,
updates them and the weights, and stores the means again. Only what is stored is narrower::

    exp_avg_codes    uint8, one for each element  --read-->  float32  --update-->  float32  --store-->  exp_avg_codes
    exp_avg_scales   float32, one per 256                       |                                      exp_avg_scales
                                                             weights

Every operation rounds once and on its own, so that a range of a parameter gets the same bits as the whole of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from counterpoint.errors import PlanError
from counterpoint.optim.blockwise import BLOCK_SIZE, count_blocks, dequantize, quantize
from counterpoint.optim.dense_optimizer import DenseOptimizer
from counterpoint.optim.validation import require_at_least, require_counts, require_decay

RANGE_SIZE = 1 << 20
"""Elements of a parameter that are updated at once, whose temporary values are float32."""
SIGNS = {"exp_avg": True, "exp_avg_sq": False}
"""The two means by name, and whether they may be negative."""
MAX_BF16_BETA = 1 - 2**-8
"""The largest decay factor with which a mean in bf16, which has 8 significant bits, still decays."""


class LowBitAdam(DenseOptimizer, ABC):
    """Adam whose state is stored in fewer bits than its arithmetic uses."""

    is_decoupled: ClassVar[bool]
    """Whether weights decay separately from the gradient, as in AdamW."""

    @abstractmethod
    def pack(self, key: str, mean: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the entries of a parameter's state that store a mean.

        Args:
            key: ``exp_avg`` or ``exp_avg_sq``.
            mean: of the shape of the parameter, contiguous.
            group: the options of the parameter.
        """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Raises:
            PlanError: an option is out of range, or a parameter is not of floating point.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.check_options(group)
        wrong = [param for param in group["params"] if not param.is_floating_point()]
        if wrong:
            raise PlanError(
                f"{type(self).__name__} was given a parameter of the shape {tuple(wrong[0].shape)} in "
                f"{wrong[0].dtype}; it updates real numbers of floating point; give the others to a torch optimizer, "
                "optimizer=[..., Adam(others)]"
            )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group.

        Raises:
            PlanError: one is out of range.
        """
        require_at_least(0, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"])
        require_decay(beta1=group["betas"][0], beta2=group["betas"][1])
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise PlanError(
                    f"{type(self).__name__} was given {option}=True, which it does not have; omit it, or use Adam or "
                    "AdamW of torch.optim"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: one of this class, or one of torch's Adam or AdamW, which the next step stores in fewer bits.

        Args:
            state_dict: what :meth:`state_dict` returned. Options that its groups lack stay as they are.

        Raises:
            PlanError: an option is out of range.
        """
        saved_groups = state_dict["param_groups"]
        groups = [{**own, **loaded} for own, loaded in zip(self.param_groups, saved_groups, strict=False)]
        for group in groups:
            self.check_options(group)
        groups += saved_groups[len(groups) :]  # which torch refuses
        super().load_state_dict({**state_dict, "param_groups": groups})  # converts all to the dtypes of parameters
        saved = [number for group in saved_groups for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if key != "step":
                    self.state[param][key] = value.to(param.device, copy=True)

    def update_param(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter and its state."""
        state, dtype = self._prepare_state(param, group), torch.promote_types(param.dtype, torch.float32)
        weights, grads = param.detach().contiguous().view(-1), grad.reshape(-1)
        for start in range(0, weights.numel(), RANGE_SIZE):
            stop = min(start + RANGE_SIZE, weights.numel())
            means = {key: read_mean(state, key, start, stop, dtype) for key in SIGNS}
            updated = weights[start:stop].to(dtype)
            update_range(
                updated, grads[start:stop].to(dtype), means, group, float(state["step"]), is_decoupled=self.is_decoupled
            )
            weights[start:stop] = updated
            for key, mean in means.items():
                store_mean(state, key, start, stop, mean)
        if not param.is_contiguous():
            param.copy_(weights.view(param.shape))

    def _prepare_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter's state, with means as they are stored, and count the step."""
        state: dict[str, Any] = self.state[param]
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        for key in SIGNS:
            if f"{key}_codes" in state:
                continue
            dtype = torch.promote_types(param.dtype, torch.float32)
            mean = state.pop(key, None)
            whole = torch.zeros(param.shape, dtype=dtype, device=param.device) if mean is None else mean.contiguous()
            state.update(self.pack(key, whole, group))
        return state


def read_mean(state: Mapping[str, Any], key: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Return a range of a stored mean in a dtype; ``start`` is a multiple of the block size."""
    if key in state:
        values: Tensor = state[key].view(-1)[start:stop].to(dtype)
        return values
    codes, scales = state[f"{key}_codes"].view(-1)[start:stop], state[f"{key}_scales"]
    return dequantize(codes, scales[start // BLOCK_SIZE : count_blocks(stop)], signed=SIGNS[key]).to(dtype)


def store_mean(state: Mapping[str, Any], key: str, start: int, stop: int, values: Tensor) -> None:
    """Store a range of a mean; ``start`` is a multiple of the block size."""
    if key in state:
        state[key].view(-1)[start:stop] = values
        return
    codes, scales = quantize(values, signed=SIGNS[key])
    state[f"{key}_codes"].view(-1)[start:stop] = codes
    state[f"{key}_scales"][start // BLOCK_SIZE : count_blocks(stop)] = scales


def update_range(
    weights: Tensor,
    grads: Tensor,
    means: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
    *,
    is_decoupled: bool,
) -> None:
    """Take a step of Adam on flat tensors of one dtype, in place; operations are those of torch, each rounded once.

    Args:
        weights: the weights.
        grads: their gradients.
        means: ``exp_avg`` and ``exp_avg_sq``.
        group: the options.
        step: the number of this step, from 1 on.
        is_decoupled: whether weights decay separately from the gradient.
    """
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    if decay and is_decoupled:
        weights.mul_(1 - lr * decay)
    elif decay:
        grads = grads + weights * decay
    exp_avg = means["exp_avg"].mul_(beta1).add_(grads * (1 - beta1))
    exp_avg_sq = means["exp_avg_sq"].mul_(beta2).add_(grads.square().mul_(1 - beta2))
    roots = exp_avg_sq.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weights.sub_(exp_avg.div(roots).mul_(lr / (1 - beta1**step)))


class BlockwiseAdam(LowBitAdam, ABC):
    """Adam whose state is quantized to 8 bits, in blocks of 256 elements that are counted within each parameter."""

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group.

        Raises:
            PlanError: one is out of range.
        """
        super().check_options(group)
        require_counts(min_8bit_size=group["min_8bit_size"])

    def pack(self, key: str, mean: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return codes and scales, or the mean in float32 if the parameter is small."""
        wide = mean.to(torch.promote_types(mean.dtype, torch.float32))
        if mean.numel() < smallest_quantized(group):
            return {key: wide}
        codes, scales = quantize(wide.view(-1), signed=SIGNS[key])
        return {f"{key}_codes": codes.view(mean.shape), f"{key}_scales": scales}

    @property
    def split_size(self) -> int:
        """Where parameters may be split: at its multiples, if as many elements are left.

        Then all blocks of a part are blocks of the parameter, and a part is quantized if the parameter is.
        """
        sizes = [
            smallest_quantized(group)
            for group in self.param_groups
            if any(param.numel() >= smallest_quantized(group) for param in group["params"])
        ]
        return count_blocks(max(sizes, default=2 * BLOCK_SIZE)) * BLOCK_SIZE


def smallest_quantized(group: Mapping[str, Any]) -> int:
    """Return the number of elements from which on a parameter is quantized: two blocks, or more."""
    return max(int(group["min_8bit_size"]), 2 * BLOCK_SIZE)


class Bf16Adam(LowBitAdam, ABC):
    """Adam whose state is rounded to bf16."""

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Check the options of a group.

        Raises:
            PlanError: one is out of range.
        """
        super().check_options(group)
        betas = group["betas"]
        if max(betas) > MAX_BF16_BETA:
            raise PlanError(
                f"betas={tuple(betas)} of {type(self).__name__} would change its state by a fraction of at most "
                f"{1 - max(betas):.2g} in a step, which is lost when it is rounded to bf16; give numbers up to "
                f"{MAX_BF16_BETA:.5f}, such as betas=(0.9, 0.99), or use AdamW8bit or AdamW"
            )

    def pack(self, key: str, mean: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the mean in bf16."""
        return {key: mean.to(torch.bfloat16)}


class AdamW8bit(BlockwiseAdam):
    """AdamW with a state of 8 bits: 2 bytes for each parameter instead of 8.

    A mean is stored as a code of 8 bits for each element and a float32 scale for each 256 elements of a parameter, in
    the order of its flattened elements. With ``s`` the largest magnitude of its 256, a stored value differs from the
    exact one by at most 0.0071 s (exp_avg) or 0.0036 s (exp_avg_sq), and by less if it is small: by at most 0.0015 s
    and 0.0008 s if it is below 0.1 s. The update itself is computed in float32 before its means are stored; in float64,
    with float64 scales, for parameters in float64.

    Args:
        params: parameters of floating point, or groups of them.
        lr: the learning rate.
        betas: decay factors of the running means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: of weights, separate from the gradient.
        amsgrad: must be False.
        min_8bit_size: parameters with fewer elements, and those with fewer than 512, have a state in float32. A group
            may have a larger number, to keep embeddings in float32 for instance.

    Raises:
        PlanError: an option is out of range, or a parameter is not of floating point.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = AdamW8bit(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> {
        ...     key: (value.dtype, tuple(value.shape))
        ...     for key, value in optimizer.state[layer.weight].items()
        ...     if key.startswith("exp_avg_sq")
        ... }
        {'exp_avg_sq_codes': (torch.uint8, (64, 64)), 'exp_avg_sq_scales': (torch.float32, (16,))}

    Cost:
        2 bytes for each parameter and 8 for each 256; in a step, temporary values of a million elements at a time.

    Source:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022; bitsandbytes' ``AdamW8bit``. That no
        positive mean of squares is stored as 0: Li et al., Memory Efficient Optimizers with 4-bit States, NeurIPS 2023.
    """

    is_decoupled = True

    def __init__(  # noqa: PLR0913 - torch's options
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        min_8bit_size: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, defaults)


class Adam8bit(BlockwiseAdam):
    """Adam with a state of 8 bits: :class:`AdamW8bit`, whose weight decay is added to the gradient.

    Args:
        params: parameters of floating point, or groups of them.
        lr: the learning rate.
        betas: decay factors of the running means of gradients and of their squares.
        eps: added to the root of the mean of squares.
        weight_decay: times the weights, is added to the gradients.
        amsgrad: must be False.
        min_8bit_size: parameters with fewer elements, and those with fewer than 512, have a state in float32.

    Raises:
        PlanError: an option is out of range, or a parameter is not of floating point.

    Source:
        As for :class:`AdamW8bit`; bitsandbytes' ``Adam8bit``.
    """

    is_decoupled = False

    def __init__(  # noqa: PLR0913 - torch's options
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        min_8bit_size: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "min_8bit_size": min_8bit_size,
        }
        super().__init__(params, defaults)


class AdamWBf16(Bf16Adam):
    """AdamW with a state in bf16: 4 bytes for each parameter instead of 8.

    Means are rounded to the nearest number in bf16, by at most 2^-8 of their value, after an update in float32; in
    float64 for parameters in float64. A mean in bf16 that changes by less in a step does not change, so that neither
    decay factor may be above 1 - 2^-8. torch's default of 0.999 is, and ``betas`` has no default.

    Args:
        params: parameters of floating point, or groups of them.
        lr: the learning rate.
        betas: decay factors of the running means of gradients and of their squares, up to 0.996.
        eps: added to the root of the mean of squares.
        weight_decay: of weights, separate from the gradient.
        amsgrad: must be False.

    Raises:
        PlanError: an option is out of range, or a parameter is not of floating point.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = AdamWBf16(layer.parameters(), lr=1e-3, betas=(0.9, 0.95))
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg"].dtype
        torch.bfloat16

    Cost:
        4 bytes for each parameter; in a step, temporary values of a million elements at a time.

    Source:
        ``AnyPrecisionAdamW`` of torchdistx, without Kahan summation.
    """

    is_decoupled = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults)


class AdamBf16(Bf16Adam):
    """Adam with a state in bf16: :class:`AdamWBf16`, whose weight decay is added to the gradient.

    Args:
        params: parameters of floating point, or groups of them.
        lr: the learning rate.
        betas: decay factors of the running means of gradients and of their squares, up to 0.996.
        eps: added to the root of the mean of squares.
        weight_decay: times the weights, is added to the gradients.
        amsgrad: must be False.

    Raises:
        PlanError: an option is out of range, or a parameter is not of floating point.

    Source:
        As for :class:`AdamWBf16`.
    """

    is_decoupled = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        super().__init__(params, defaults)
