"""What happens in a call of batch norm while blocks run: whom it meets, and where its running statistics go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoint.fabric.fabric import Group
from counterpoint.runtime.deferred import Deferred, Kept
from counterpoint.runtime.normal import CALLS, COUNTS, Normal, call_anew
from counterpoint.runtime.norms import Running, normalize
from counterpoint.runtime.store import Store
from counterpoint.runtime.together import Replicas, Together
from counterpoint.runtime.watching import Function, Instead


class Norms:
    """The modules of batch norm of one rank.

    Args:
        kept: what they keep of their batches.
        store: the rank's parameters and buffers.
        together: how some meet those of other ranks; None where none do.
        deferred: where running statistics wait for the end of a mini-batch; None where every call changes them.
    """

    def __init__(
        self, kept: Sequence[Kept], store: Store, together: Together | None, deferred: Deferred | None
    ) -> None:
        self.kept = {id(store.buffers[one.mean]): one for one in kept}
        self.counters = {id(store.buffers[one.counter]) for one in kept if one.counter}
        self.together = together
        self.deferred = deferred

    def instead(
        self, block: int, micro: int, sizes: Mapping[int, int], *, is_again: bool = False
    ) -> Mapping[Function, Instead]:
        """Return what the modules' functions do in this plan, while a microbatch goes through blocks.

        Args:
            block: the first of them.
            micro: the microbatch.
            sizes: of every microbatch.
            is_again: whether the blocks were run on it before, so that nothing is taken into running statistics.
        """
        group = self.together.group(block, micro, sizes) if self.together is not None else ()
        if not group and not is_again and self.deferred is None:
            return {}
        return Normalizing(self, micro, group, is_again=is_again).instead

    def keep_up(self, names: Sequence[str], block: int, micro: int, sizes: Mapping[int, int]) -> None:
        """Bring running statistics that have changed to members without samples; all call it after a forward."""
        if self.together is not None and self.deferred is None:
            self.together.keep_up(names, block, micro, sizes)

    def begin(self, *, is_stream: bool) -> None:
        """A step begins."""
        if self.deferred is not None:
            self.deferred.begin(is_stream=is_stream)

    def tell(self, micros: Collection[int]) -> None:
        """A mini-batch is about to be decided on, which everybody of the commit does at this place."""
        if self.deferred is not None:
            self.deferred.tell(micros)

    def hear(self) -> None:
        """What others tell of it is here."""
        if self.deferred is not None:
            self.deferred.hear()

    def commit(self, *, is_applied: bool) -> None:
        """It has been decided on."""
        if self.deferred is not None:
            self.deferred.commit(is_applied=is_applied)

    def drop(self) -> None:
        """Forget what was seen of a mini-batch that nobody decided on, because a step failed."""
        if self.deferred is not None:
            self.deferred.drop()


class Normalizing:
    """What calls of batch norm come to that are those of a microbatch in a plan.

    Args:
        norms: the rank's modules.
        micro: the microbatch.
        group: the ranks that some of the modules meet; none if they meet nobody.
        is_again: whether nothing is taken into running statistics.
    """

    def __init__(self, norms: Norms, micro: int, group: Group, *, is_again: bool) -> None:
        self.norms = norms
        self.micro = micro
        self.group = group
        self.is_again = is_again

    @property
    def instead(self) -> dict[Function, Instead]:
        """What functions do."""
        return {**dict.fromkeys(COUNTS if self.is_again else (), self.count), **dict.fromkeys(CALLS, self.call)}

    def count(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, but count no batch again."""
        return args[0] if id(args[0]) in self.norms.counters else func(*args, **kwargs)

    def call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call the function, or normalize as the plan says."""
        call = CALLS[func](*args, **kwargs)
        return self.normalize(call, lambda: func(*args, **kwargs)) if call.training else func(*args, **kwargs)

    def normalize(self, call: Normal, plainly: Callable[[], Tensor]) -> Tensor:
        """Return the normalized values of one call.

        Args:
            call: its arguments.
            plainly: the call as the module makes it.
        """
        together, deferred = self.norms.together, self.norms.deferred
        path = together.paths.get(call.mark) if together is not None and self.group else None
        kept = self.norms.kept.get(call.mark)
        is_apart = kept is not None and (self.is_again or deferred is not None)
        if path is None and not is_apart:
            return plainly()
        mean, var, momentum = call.running_mean, call.running_var, call.momentum
        if is_apart and mean is not None and var is not None:
            mean, var, momentum = torch.zeros_like(mean), torch.zeros_like(var), 1.0
        count = call.num_values
        if path is None or together is None:
            result = call_anew(call._replace(running_mean=mean, running_var=var, momentum=momentum))
        else:
            union = Replicas(together.fabric, self.group, path)
            running = Running(mean, var, momentum) if mean is not None and var is not None else None
            result = normalize(call.values, call.weight, call.bias, running=running, eps=call.eps, union=union)
            count = union.count
        is_noted_here = path is None or together is None or together.fabric.rank == self.group[0]
        if kept is not None and deferred is not None and not self.is_again and is_noted_here:
            assert mean is not None, "what is kept has a mean"
            assert var is not None, "what is kept has a variance"
            deferred.note(kept, self.micro, (mean, var), count, call.momentum)
        return result
