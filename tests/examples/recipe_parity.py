"""Compare a recipe of examples/recipes with a plain PyTorch loop, as `counterpoint parity` does, in this process."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from counterpoint.training.parity import ParityReport, compare_plans
from counterpoint.training.recording import record_script

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def load_recipe(name: str) -> ModuleType:
    """The recipe as a module; its main part does not run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare_recipe(name: str, *arguments: str, strategies: Sequence[str], steps: int = 2) -> ParityReport:
    """Train the first steps of a recipe in a plain loop and under each strategy, in float64.

    Microbatches are those of the recipe. A strategy that the recipe cannot use, or a model that draws random numbers and
    so has no plain loop to be compared with, is an error.
    """
    run = record_script(RECIPES / f"{name}.py", arguments, num_steps=steps)
    plans = [replace(run.requested_plan, strategy=strategy) for strategy in strategies]
    report = compare_plans(run, plans, dtype=torch.float64)
    assert report.reference == "a plain PyTorch loop", "give the argument that turns random numbers off"
    refused = {plan.strategy: plan.refusal for plan in report.plans if plan.refusal}
    assert not refused, refused
    return report


def worst_difference(report: ParityReport) -> float:
    """The largest relative difference of any plan."""
    return max(plan.worst for plan in report.plans)
