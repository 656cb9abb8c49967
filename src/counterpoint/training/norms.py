"""What is said of batch norm where a plan makes several microbatches of a batch."""

from __future__ import annotations

import warnings

from torch import nn

from counterpoint.compiler.compile import Compiled
from counterpoint.cutting.eager import Modes
from counterpoint.errors import PlanError
from counterpoint.runtime.norm_rules import NormRule
from counterpoint.runtime.together import forwards, norms_of
from counterpoint.training.options import Options

OTHER_NORMS = "or take a norm that needs no batch (GroupNorm, LayerNorm)"


def has_meetings(model: nn.Module, options: Options) -> bool:
    """Tell whether modules of batch norm of several ranks may normalize together."""
    return bool(norms_of(model, every=options.batch_norm == "sync"))


def normalizing_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of batch norm that go by the values that they are given, with their paths."""
    is_training = {id(module): flag for module, flag in Modes(model).flags}
    kind = nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - what all of them are
    return [(path, one) for path, one in model.named_modules() if isinstance(one, kind) and is_training[id(one)]]


def least_samples(model: nn.Module) -> int:
    """Return how many samples a microbatch has at least where nobody says how many there are.

    Batch norm has no variance of one value, which is all that a channel may have of one sample.
    """
    return 2 if normalizing_modules(model) else 1


def judge_norms(model: nn.Module, compiled: Compiled, num_samples: int, rule: NormRule | None, rank: int) -> None:
    """Say once where batch norm does not go by the whole batch, unless it was said what it shall do.

    Args:
        model: as its user built it.
        compiled: the plan for it.
        num_samples: of a microbatch.
        rule: what was asked for.
        rank: the first of this process; only rank 0 gives notice.

    Raises:
        PlanError: it was said that this is an error.
    """
    found = normalizing_modules(model)
    if not found or rule not in {None, "error"}:
        return
    micros = len(compiled.program.micros)
    runs = max((len(run) for row in compiled.program.rows for run in forwards(row.body).values()), default=0)
    path, module = found[0]
    if rule == "error" and micros > 1 and (runs > 1 or not all(isinstance(one, nn.SyncBatchNorm) for _, one in found)):
        raise PlanError(
            f"{told(path, module, compiled, num_samples)}, which batch_norm='error' refuses; pass 'deferred' for "
            f"running statistics of the whole batch, 'sync' to normalize replicas together, {OTHER_NORMS}"
        )
    if rule is None and runs > 1 and rank == 0:
        warnings.warn(
            f"{told(path, module, compiled, num_samples)}; its running statistics are: pass batch_norm='deferred' "
            "where that is meant, 'microbatch' to change them after every microbatch, 'sync' to normalize replicas "
            f"together, {OTHER_NORMS}",
            stacklevel=2,
        )


def told(path: str, module: nn.Module, compiled: Compiled, num_samples: int) -> str:
    """Return which module goes by how much of a batch."""
    micros = len(compiled.program.micros)
    samples = f"{num_samples} sample{'s' if num_samples != 1 else ''}"
    return (
        f"{type(module).__name__} '{path}' normalizes microbatches of {samples}, {micros} to a batch under "
        f"{compiled.plan}, so that its outputs are not those on the whole batch"
    )
