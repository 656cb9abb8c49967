"""Optimizers of a DeepSpeed configuration as those of torch, with DeepSpeed's defaults.

``Adam`` is AdamW unless ``adam_w_mode`` is false, and neither has weight decay unless it is given: DeepSpeed's fused
optimizers differ in both from ``torch.optim``. With ``torch_adam`` the defaults are torch's.

Source:
    DeepSpeed 0.19, runtime/engine.py (``_configure_basic_optimizer``), ops/adam/fused_adam.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from counterpoint.compat.deepspeed.names import suggest_name
from counterpoint.errors import PlanError

TORCH_OPTIMIZERS = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop")
"""Classes of ``torch.optim`` that a configuration may name; their parameters and defaults are torch's."""

FUSED_ADAM = MappingProxyType(
    {"lr": 1e-3, "bias_correction": True, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
)
"""Parameters and defaults of DeepSpeed's Adam and AdamW."""

TORCH_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused", "capturable")
"""Parameters that ``torch_adam`` passes to torch."""

ADAM_SWITCHES = ("torch_adam", "adam_w_mode", "set_grad_none", "fused", "max_grad_norm")
"""Further keys under ``params`` of Adam and AdamW."""

REFUSED_OPTIMIZERS = MappingProxyType(
    {
        "OneBitAdam": "make counterpoint.optim.one_bit_adam.OneBitAdam in the script, and write "
        "data(n, compress=onebit, compress_from=FREEZE_STEP)",
        "ZeroOneAdam": "write AdamW, and data(n, compress=sign) for gradients of one bit with error feedback",
        "OneBitLamb": "make cp.LAMB in the script, and write data(n, compress=sign)",
        "Lamb": "make cp.LAMB in the script: DeepSpeed limits the ratio of norms to max_coeff, cp.LAMB the norm",
        "Lion": "make it in the script and pass it to cp.parallelize",
        "Muon": "make torch.optim.Muon in the script and pass it to cp.parallelize",
        "MuAdam": "make it in the script with the package mup and pass it to cp.parallelize",
        "MuAdamW": "make it in the script with the package mup and pass it to cp.parallelize",
        "MuSGD": "make it in the script with the package mup and pass it to cp.parallelize",
    }
)
"""DeepSpeed's other optimizers, and what to do instead."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """An optimizer of torch.

    Args:
        name: of its class in ``torch.optim``.
        params: its arguments.
    """

    name: str
    params: Mapping[str, Any]


def resolve_optimizer(name: str, params: Mapping[str, Any]) -> OptimizerConfig:
    """Return the torch optimizer that computes what DeepSpeed's computes.

    Args:
        name: ``optimizer.type`` of the configuration; the case of DeepSpeed's own names does not matter.
        params: ``optimizer.params``.

    Raises:
        PlanError: there is no such optimizer or parameter, or it cannot be had here.

    Example:
        >>> resolve_optimizer("Adam", {"lr": 0.1, "adam_w_mode": False})
        OptimizerConfig(name='Adam', params={'lr': 0.1, 'betas': (0.9, 0.999), 'eps': 1e-08, 'weight_decay': 0.0})
    """
    if params.get("max_grad_norm"):
        raise PlanError(
            f"optimizer.params.max_grad_norm={params['max_grad_norm']} clips nothing in DeepSpeed either; write "
            "gradient_clipping outside of the optimizer"
        )
    if name.lower() in {"adam", "adamw"}:
        return _resolve_adam(name, params)
    by_lower_name = {refused.lower(): refused for refused in REFUSED_OPTIMIZERS}
    if name.lower() in by_lower_name:
        refused = by_lower_name[name.lower()]
        raise PlanError(f"optimizer.type={name!r} is not supported; {REFUSED_OPTIMIZERS[refused]}")
    if name not in TORCH_OPTIMIZERS:
        known = ("Adam", "AdamW", *TORCH_OPTIMIZERS)
        raise PlanError(f"optimizer.type={name!r} is not one of {', '.join(known)}{suggest_name(name, known)}")
    return OptimizerConfig(name, {key: value for key, value in params.items() if key != "max_grad_norm"})


def _resolve_adam(name: str, params: Mapping[str, Any]) -> OptimizerConfig:
    """Return torch's Adam or AdamW."""
    is_torch = bool(params.get("torch_adam", False))
    known = {*ADAM_SWITCHES, *(TORCH_ADAM if is_torch else FUSED_ADAM)}
    for key in params:
        if key not in known:
            raise PlanError(f"optimizer.params of {name} has no {key!r}{suggest_name(key, sorted(known))}")
    cls = "AdamW" if name.lower() == "adamw" or params.get("adam_w_mode", True) else "Adam"
    given = {key: value for key, value in params.items() if key not in ADAM_SWITCHES}
    if is_torch:
        return OptimizerConfig(cls, {key: _as_tuple(value) for key, value in given.items()})
    values = {**FUSED_ADAM, **given}
    if not values.pop("bias_correction"):
        raise PlanError(
            f"optimizer.params.bias_correction=false: torch's {cls} always corrects the bias of its means; omit it"
        )
    if values.pop("amsgrad"):
        raise PlanError("optimizer.params.amsgrad=true: DeepSpeed's Adam has no AMSGrad; set torch_adam to true")
    return OptimizerConfig(cls, {key: _as_tuple(value) for key, value in values.items()})


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
