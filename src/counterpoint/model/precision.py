"""Mixed precision of a plan: the dtypes that a forward computes in, and that gradients are summed in over ranks.

Weights, their gradients after backward, and optimizer state stay as the model has them, usually float32: they are the
master weights. Two ways to compute in a narrower dtype::

    autocast=True    operations    each casts its arguments by the lists of torch.autocast: matrix products to the
                                   narrower dtype; sums, norms and losses to float32
    autocast=False   modules       parameters and inputs of each module are cast, so that its operations compute in
                                   the narrower dtype; norms of torch.nn compute in float32

With ``weights="compute"`` ranks hold what the model reads as casts, and its gradients, in the narrower dtype only, and
master weights of what they update.

Sources: "Mixed Precision Training" (Micikevicius et al., 2018); torch's ``MixedPrecisionPolicy`` of FSDP2 for casts of
modules, with ``param_dtype`` as ``compute``, ``output_dtype`` as ``output`` and ``reduce_dtype`` as ``reduce``; ZeRO
(Rajbhandari et al., SC 2020, section 3.1) for ``weights``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from counterpoint.errors import PlanError
from counterpoint.model.option_text import parse_option_text
from counterpoint.optim.validation import shorten

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtypes that a forward, and a sum of gradients, can have: torch's names by those of plans."""


OTHER_NAMES = {
    "amp": "bf16(autocast=true) or fp16(autocast=true)",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "half": "fp16",
}
"""Precisions by other names for them."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a forward and its backward, and of the reductions of gradients.

    Args:
        compute: dtype of parameters and activations: ``fp32``, ``bf16`` or ``fp16``. Parameters that are no wider
            keep theirs.
        autocast: whether every operation casts its arguments as ``torch.autocast`` does, instead of every module.
        norms: dtype of the norms of ``torch.nn`` without autocast: ``fp32``, or ``compute``.
        output: dtype of the model's output, and so of the loss, without autocast: ``fp32``, or ``compute``.
        rounding: how updated weights are rounded, if the model's own are in bf16: ``nearest``, or ``stochastic``.
        reduce: dtype in which gradients travel and are summed over ranks: ``fp32``, ``bf16`` or ``fp16``. ``fp32``, and
            a dtype that is no narrower than a gradient, do not cast it.
        weights: dtype of the whole weights and gradients that ranks hold of parameters that modules cast: ``fp32``,
            which is the parameters' own, or ``compute``, with master weights of the part that a rank updates.

    Raises:
        PlanError: an argument has another value than those listed.

    Example:
        >>> print(Precision("bf16", norms="compute", reduce="bf16"))
        bf16(norms=compute, reduce=bf16)
    """

    compute: str
    autocast: bool = False
    norms: str = "fp32"
    output: str = "fp32"
    rounding: str = "nearest"
    reduce: str = "fp32"
    weights: str = "fp32"

    def __post_init__(self) -> None:
        if self.compute not in DTYPES:
            hint = f"; write {OTHER_NAMES[self.compute]}" if self.compute in OTHER_NAMES else ""
            raise PlanError(f"precision {shorten(repr(self.compute))} is not one of {', '.join(DTYPES)}{hint}")
        if self.reduce not in DTYPES:
            raise PlanError(f"reduce={shorten(repr(self.reduce))} is not one of {', '.join(DTYPES)}")
        if type(self.autocast) is not bool:
            raise PlanError(f"autocast={shorten(repr(self.autocast))} is not True or False")
        for name in ("norms", "output", "weights"):
            value = getattr(self, name)
            if value not in ("fp32", "compute"):
                raise PlanError(f"{name}={shorten(repr(value))} is not fp32 or compute")
        if self.rounding not in ("nearest", "stochastic"):
            raise PlanError(f"rounding={shorten(repr(self.rounding))} is not nearest or stochastic")
        if self.rounding == "stochastic" and self.compute != "bf16":
            raise PlanError(
                f"rounding=stochastic is for weights in bf16; write bf16(rounding=stochastic), not {self.compute}"
            )
        if self.autocast and self.compute == "fp32":
            raise PlanError("autocast computes in bf16 or fp16; give one of them, or fp32 without autocast")
        if self.autocast and (self.norms, self.output) != ("fp32", "fp32"):
            raise PlanError("autocast has its own rules for norms and outputs; omit norms and output, or autocast")
        self._require_masters()

    def _require_masters(self) -> None:
        """Check that gradients and casts have a dtype in which weights can be held, next to float32 master weights.

        Raises:
            PlanError: there is no narrower dtype, gradients are summed in another one, or weights have no masters.
        """
        if self.weights == "fp32":
            return
        if not self.casts_modules or self.rounding != "nearest":
            raise PlanError(
                "weights=compute is for modules that are cast to bf16 or fp16, and keeps master weights; write "
                "bf16(reduce=bf16, weights=compute), without autocast and rounding, or omit weights"
            )
        if self.reduce != self.compute:
            raise PlanError(
                f"weights=compute holds gradients in {self.compute}, and ranks sum them in it; write "
                f"{self.compute}(reduce={self.compute}, weights=compute), or omit weights"
            )

    def __str__(self) -> str:
        """Write it as :func:`parse_precision` reads it."""
        options = [
            f"{field.name}={str(getattr(self, field.name)).lower()}"
            for field in fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"{self.compute}({', '.join(options)})" if options else self.compute

    @property
    def casts_modules(self) -> bool:
        """Whether modules are cast."""
        return not self.autocast and self.compute != "fp32"

    @property
    def casts_grads(self) -> bool:
        """Whether gradients are cast to a narrower dtype where they are summed over ranks."""
        return self.reduce != "fp32"

    @property
    def holds_casts(self) -> bool:
        """Whether ranks hold what modules cast in the dtype of the forward, and master weights of what they update."""
        return self.weights == "compute"

    @property
    def reduce_bytes(self) -> int | None:
        """Bytes of an element of the gradients that ranks sum; None if they are not cast."""
        return 2 if self.casts_grads else None

    @property
    def uses_fp16(self) -> bool:
        """Whether gradients are in fp16 anywhere, whose small ones are zero without a loss scale."""
        return "fp16" in {self.compute, self.reduce}

    @property
    def item_bytes(self) -> int:
        """Bytes of a number that modules compute with."""
        return 2 if self.casts_modules else 4


PrecisionArgument: TypeAlias = Precision | str | None
"""What options take: a precision, its text, or None for the dtypes of the model."""


def parse_precision(value: object) -> Precision | None:
    """Return the precision that an option asks for; None for the dtypes of the model.

    Args:
        value: a precision, a dtype of torch, None, or a text such as ``bf16`` or ``fp16(autocast=true)``.

    Raises:
        PlanError: it is something else.

    Example:
        >>> parse_precision("fp16(autocast=true)")
        Precision(compute='fp16', autocast=True, norms='fp32', output='fp32', rounding='nearest', reduce='fp32', \
weights='fp32')
    """
    if value is None or isinstance(value, Precision):
        return value
    known = f"give {', '.join(DTYPES)}, a text such as 'bf16(autocast=true)', or cp.Precision(...)"
    by_dtype = {f"torch.{name}": Precision(short) for short, name in DTYPES.items()}
    if str(value) in by_dtype:  # a dtype of torch, which this package does not import
        return by_dtype[str(value)]
    compute, texts = parse_option_text(
        "precision",
        value,
        {"autocast", "norms", "output", "rounding", "reduce", "weights"},
        known=known,
        rule=(
            "the options are autocast=true, norms=compute, output=compute, rounding=stochastic, reduce=bf16 or fp16, "
            "and weights=compute"
        ),
    )
    flags = {"true": True, "false": False}
    options = {name: flags.get(text, text) if name == "autocast" else text for name, text in texts.items()}
    return replace(Precision(compute), **options)  # type: ignore[arg-type]  # checked there
