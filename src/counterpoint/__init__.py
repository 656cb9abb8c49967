"""Every way to train a PyTorch model in parallel, as one composable plan.

Names are imported when they are first used, so that ``import counterpoint`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.compiler.compile import CompiledPlan, compile  # noqa: A004 - read as cp.compile
    from counterpoint.errors import (
        CheckpointError,
        CounterpointError,
        DataError,
        LaunchError,
        PeerError,
        PlanError,
        ProgramError,
    )
    from counterpoint.model.spec import ModelSpec, linear_chain
    from counterpoint.optim.lamb import LAMB
    from counterpoint.optim.lars import LARS
    from counterpoint.optim.lr_schedules import large_batch_schedule
    from counterpoint.plan.plan import Plan
    from counterpoint.program.program import Program
    from counterpoint.program.text import format_program, parse_program
    from counterpoint.program.trace import Trace
    from counterpoint.program.verify.verifier import verify
    from counterpoint.simulator.simulate import simulate
    from counterpoint.strategies.data import Data
    from counterpoint.strategies.parameter_server import Server
    from counterpoint.strategies.pipeline.pipeline import Pipeline
    from counterpoint.strategies.tensor import Tensor
    from counterpoint.strategies.zero import Zero
    from counterpoint.training.callbacks.callback import Callback, History
    from counterpoint.training.elastic_trainer import ElasticTrainer
    from counterpoint.training.launch import launch
    from counterpoint.training.metrics import MeanMetric
    from counterpoint.training.parallelize import parallelize
    from counterpoint.training.profiling import profile
    from counterpoint.training.trainer import Trainer

__version__ = "0.1.0"

_MODULES = {
    "Callback": "training.callbacks.callback",
    "CheckpointError": "errors",
    "CompiledPlan": "compiler.compile",
    "CounterpointError": "errors",
    "Data": "strategies.data",
    "DataError": "errors",
    "ElasticTrainer": "training.elastic_trainer",
    "History": "training.callbacks.callback",
    "LAMB": "optim.lamb",
    "LARS": "optim.lars",
    "LaunchError": "errors",
    "ModelSpec": "model.spec",
    "PeerError": "errors",
    "Pipeline": "strategies.pipeline.pipeline",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Program": "program.program",
    "ProgramError": "errors",
    "Server": "strategies.parameter_server",
    "MeanMetric": "training.metrics",
    "Tensor": "strategies.tensor",
    "Trace": "program.trace",
    "Trainer": "training.trainer",
    "Zero": "strategies.zero",
    "linear_chain": "model.spec",
    "verify": "program.verify.verifier",
    "compile": "compiler.compile",
    "format_program": "program.text",
    "large_batch_schedule": "optim.lr_schedules",
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
    "CompiledPlan",
    "CounterpointError",
    "Data",
    "DataError",
    "ElasticTrainer",
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
    "MeanMetric",
    "Tensor",
    "Trace",
    "Trainer",
    "Zero",
    "linear_chain",
    "verify",
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
    if name in _MODULES:
        return getattr(import_module(f"counterpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, "__version__"])
