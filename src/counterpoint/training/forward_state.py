"""Find what a forward keeps outside of parameters and buffers, which ranks with a trace or parts of a batch do not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from counterpoint.data.microbatch_reader import preserve_rng
from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import Inputs, ModuleAttributes, preserve_state, split_call_args
from counterpoint.runtime.draw_sites import other_rng_state


@dataclass(frozen=True, slots=True)
class ForwardState:
    """What a forward has left behind.

    Args:
        attributes: of the model, which it has changed or added.
        difference: of the outputs of a second forward on the same inputs, relative to the largest value.
        uses_other_generators: whether it draws from Python's or numpy's generator.
    """

    attributes: tuple[str, ...] = ()
    difference: float = 0.0
    uses_other_generators: bool = False

    @staticmethod
    def find(model: nn.Module, inputs: Inputs) -> ForwardState:
        """Run the model in training mode; a second time, if it has changed an attribute.

        Args:
            model: the module; its state is preserved.
            inputs: those of a microbatch.
        """
        attributes = ModuleAttributes(model)
        try:
            first, uses_other_generators = _run(model, inputs, attributes)
            changed = attributes.find_changed()
            difference = _difference(first, _run(model, inputs, attributes)[0]) if changed else 0.0
        except Exception:  # noqa: BLE001 - training raises it again, with its location
            return ForwardState()
        finally:
            attributes.restore()
        return ForwardState(tuple(changed), difference, uses_other_generators)

    def require_none(self, model: nn.Module, plan: str, way: str) -> None:
        """Check that an output does not depend on earlier forwards.

        Args:
            model: that was run.
            plan: as text, for the message.
            way: how the plan runs it.

        Raises:
            PlanError: it does.
        """
        if self.difference:
            raise PlanError(
                f"the forward of {type(model).__name__} changes the attribute {self.attributes[0]}, and computes with "
                f"it: on the same inputs its output is another one the second time, by {self.difference:.1e} of the "
                f"largest value; {plan} runs {way}, so the attribute would not be that of one forward on each batch; "
                "give the value to forward as an input, keep it as a buffer (register_buffer), or train with one "
                "microbatch for each replica of a whole model (data, zero of level 1 or 2)"
            )

    def require_no_traced_draws(self, model: nn.Module) -> None:
        """Check that a trace does not keep numbers that Python or numpy has drawn.

        Raises:
            PlanError: it does.
        """
        if self.uses_other_generators:
            raise PlanError(
                f"the forward of {type(model).__name__} draws from the generator of Python or numpy, but a model is "
                "split along the operations of one call, which would repeat the numbers of that call in every step; "
                "draw with torch.rand, or use a strategy that keeps the model whole (data, zero of level 1 or 2, "
                "server)"
            )


def _run(model: nn.Module, inputs: Inputs, attributes: ModuleAttributes) -> tuple[list[Tensor], bool]:
    """Return the output tensors, and whether other generators than torch's were used; attributes stay changed."""
    args, kwargs = split_call_args(tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs))
    with preserve_rng(), preserve_state(model, attributes=attributes), torch.enable_grad():
        before = other_rng_state()
        output = model(*args, **kwargs)
        uses_other_generators = other_rng_state() != before
    return [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)], uses_other_generators


def _difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest relative difference; 0 if it is rounding."""
    if [leaf.shape for leaf in first] != [leaf.shape for leaf in second]:
        return math.inf
    largest = 0.0
    for one, other in zip(first, second, strict=True):
        if one.is_floating_point() and one.numel() and not torch.equal(one.nan_to_num(), other.nan_to_num()):
            error = float((one - other).abs().nan_to_num().max()) / (float(one.abs().nan_to_num().max()) or 1.0)
            largest = max(largest, error if error > torch.finfo(one.dtype).eps ** 0.5 else 0.0)
    return largest
