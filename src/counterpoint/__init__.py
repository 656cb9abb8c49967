"""Every way to train a PyTorch model in parallel, as one composable plan.

Names are imported on first use, so that ``import counterpoint`` is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoint.compiler.compile import CompiledPlan, compile  # noqa: A004 - read as cp.compile
    from counterpoint.data.sampler import LengthGroupedBatchSampler
    from counterpoint.errors import (
        CheckpointError,
        CounterpointError,
        DataError,
        LaunchError,
        PeerError,
        PlanError,
        ProgramError,
    )
    from counterpoint.launchers.function import launch
    from counterpoint.model.precision import Precision
    from counterpoint.model.spec import ModelSpec, linear_chain
    from counterpoint.optim.lamb import LAMB
    from counterpoint.optim.lars import LARS
    from counterpoint.optim.lr_schedules import large_batch_schedule
    from counterpoint.plan.plan import Plan
    from counterpoint.program.program import Program
    from counterpoint.program.text import format_program, parse_program
    from counterpoint.program.trace import Trace
    from counterpoint.program.verify.verifier import verify
    from counterpoint.runtime.loss.loss_reduction import WeightedMean
    from counterpoint.runtime.loss.loss_scale import DynamicLossScale
    from counterpoint.simulator.simulate import simulate
    from counterpoint.strategies.data import Data
    from counterpoint.strategies.parameter_server import Server
    from counterpoint.strategies.pipeline.pipeline import Pipeline
    from counterpoint.strategies.tensor import Tensor
    from counterpoint.strategies.zero import Zero
    from counterpoint.training.callbacks.callback import Callback, History
    from counterpoint.training.checkpointing.export import export_checkpoint
    from counterpoint.training.elastic_trainer import ElasticTrainer
    from counterpoint.training.metrics import MeanMetric
    from counterpoint.training.parallelize import parallelize
    from counterpoint.training.parity import parity
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
    "DynamicLossScale": "runtime.loss.loss_scale",
    "ElasticTrainer": "training.elastic_trainer",
    "History": "training.callbacks.callback",
    "LAMB": "optim.lamb",
    "LARS": "optim.lars",
    "LaunchError": "errors",
    "LengthGroupedBatchSampler": "data.sampler",
    "MeanMetric": "training.metrics",
    "ModelSpec": "model.spec",
    "PeerError": "errors",
    "Pipeline": "strategies.pipeline.pipeline",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Precision": "model.precision",
    "Program": "program.program",
    "ProgramError": "errors",
    "Server": "strategies.parameter_server",
    "Tensor": "strategies.tensor",
    "Trace": "program.trace",
    "Trainer": "training.trainer",
    "WeightedMean": "runtime.loss.loss_reduction",
    "Zero": "strategies.zero",
    "compile": "compiler.compile",
    "export_checkpoint": "training.checkpointing.export",
    "format_program": "program.text",
    "large_batch_schedule": "optim.lr_schedules",
    "launch": "launchers.function",
    "linear_chain": "model.spec",
    "parallelize": "training.parallelize",
    "parity": "training.parity",
    "parse_program": "program.text",
    "profile": "training.profiling",
    "simulate": "simulator.simulate",
    "verify": "program.verify.verifier",
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
    "DynamicLossScale",
    "ElasticTrainer",
    "History",
    "LaunchError",
    "LengthGroupedBatchSampler",
    "MeanMetric",
    "ModelSpec",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Precision",
    "Program",
    "ProgramError",
    "Server",
    "Tensor",
    "Trace",
    "Trainer",
    "WeightedMean",
    "Zero",
    "compile",
    "export_checkpoint",
    "format_program",
    "large_batch_schedule",
    "launch",
    "linear_chain",
    "parallelize",
    "parity",
    "parse_program",
    "profile",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in _MODULES:
        return getattr(import_module(f"counterpoint.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
