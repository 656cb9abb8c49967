"""Every way to train a PyTorch model in parallel, as one composable plan.

Names are imported when they are first used, so that ``import counterpoint`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.compiler.compile import Compiled, compile  # noqa: A004 - read as cp.compile
    from counterpoint.errors import (
        CheckpointError,
        CounterpointError,
        DataError,
        LaunchError,
        PeerError,
        PlanError,
        ProgramError,
    )
    from counterpoint.model.spec import ModelSpec, chain
    from counterpoint.optim.lamb import LAMB
    from counterpoint.optim.lars import LARS
    from counterpoint.optim.schedule import large_batch_schedule
    from counterpoint.plan import Plan
    from counterpoint.program.laws import check
    from counterpoint.program.program import Program
    from counterpoint.program.text import format_program, parse_program
    from counterpoint.program.trace import Trace
    from counterpoint.simulator.simulate import simulate
    from counterpoint.strategies.data import Data
    from counterpoint.strategies.pipeline import Pipeline
    from counterpoint.strategies.server import Server
    from counterpoint.strategies.tensor import Tensor
    from counterpoint.strategies.zero import Zero
    from counterpoint.training.elastic import Elastic
    from counterpoint.training.events import Callback, History
    from counterpoint.training.launch import launch
    from counterpoint.training.parallelize import parallelize
    from counterpoint.training.profiling import profile
    from counterpoint.training.tally import Tally
    from counterpoint.training.trainer import Trainer

__version__ = "0.1.0"

_HOMES = {
    "Callback": "training.events",
    "CheckpointError": "errors",
    "Compiled": "compiler.compile",
    "CounterpointError": "errors",
    "Data": "strategies.data",
    "DataError": "errors",
    "Elastic": "training.elastic",
    "History": "training.events",
    "LAMB": "optim.lamb",
    "LARS": "optim.lars",
    "LaunchError": "errors",
    "ModelSpec": "model.spec",
    "PeerError": "errors",
    "Pipeline": "strategies.pipeline",
    "Plan": "plan",
    "PlanError": "errors",
    "Program": "program.program",
    "ProgramError": "errors",
    "Server": "strategies.server",
    "Tally": "training.tally",
    "Tensor": "strategies.tensor",
    "Trace": "program.trace",
    "Trainer": "training.trainer",
    "Zero": "strategies.zero",
    "chain": "model.spec",
    "check": "program.laws",
    "compile": "compiler.compile",
    "format_program": "program.text",
    "large_batch_schedule": "optim.schedule",
    "launch": "training.launch",
    "parallelize": "training.parallelize",
    "parse_program": "program.text",
    "profile": "training.profiling",
    "simulate": "simulator.simulate",
}

__all__ = [
    "LAMB",
    "LARS",
    "Callback",
    "CheckpointError",
    "Compiled",
    "CounterpointError",
    "Data",
    "DataError",
    "Elastic",
    "History",
    "LaunchError",
    "ModelSpec",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Program",
    "ProgramError",
    "Server",
    "Tally",
    "Tensor",
    "Trace",
    "Trainer",
    "Zero",
    "chain",
    "check",
    "compile",
    "format_program",
    "large_batch_schedule",
    "launch",
    "parallelize",
    "parse_program",
    "profile",
    "simulate",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name in _HOMES:
        return getattr(import_module(f"counterpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
