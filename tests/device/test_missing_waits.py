"""Every wait for a collective is needed: without any one of them a race, an error or another number is found."""

import ast
import gc
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch.nn.functional as F

import counterpoint
from counterpoint.data.sampler import split_batch
from counterpoint.plan.plan import Plan
from counterpoint.runtime.microbatches import SlicedBatch
from counterpoint.runtime.optimizer_spec import OptimizerSpec
from counterpoint.testing.device_survey import batches, build, make_optimizer
from counterpoint.testing.stand_in_collectives import StreamedWorld
from counterpoint.testing.stand_in_device import DEVICE
from counterpoint.testing.stand_in_streams import SourceLine
from counterpoint.training.options import TrainingOptions
from counterpoint.training.ranks.local_ranks import LocalRanks

SOURCE = Path(counterpoint.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")


class Case(NamedTuple):
    """What is trained: a model of the survey, a plan with passes, and options."""

    name: str
    plan: str
    passes: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})


CASES = (
    Case("mlp", "data(2)", ("overlap",), {"clip_norm": 0.5}),
    Case("mlp", "zero(2, level=3)"),
    Case("mlp", "data(2, compress=fp16)"),
    Case("mlp", "data(2, compress=topk)"),
    Case("mlp", "data(2, compress=sign)"),
    Case("mlp", "data(2, compress=int8)"),
    Case("mlp", "data(2, compress=twobit)"),
    Case("mlp", "data(2, compress=powersgd)"),
    Case("mlp", "data(2, reduce=adasum)"),
    Case("mlp", "data(2, sync_every=2)"),
    Case("mlp", "zero(2, level=3)", ("overlap",), {"precision": "fp32(reduce=bf16)"}),
    Case("mlp", "pipeline(2) * data(2)", ("overlap",)),
    Case("mlp", "server(2)"),
    Case("experts", "tensor(2)"),
    Case("cnn", "data(2)"),
    Case("cnn", "data(2)", options={"batch_norm": "microbatch"}),
    Case("sync_batch_norm", "data(2)", options={"batch_norm": "sync"}),
    Case("embedding", "data(2)"),
    Case("embedding", "zero(2, level=1)"),
    Case("mlp", "data(2)", ("gather_outputs",), {"loss_reduction": "batch"}),
)


BY_CHANCE = {"bucket_plan.py:BucketPlan.finish_sync"}
"""Agree on numbers of the host that are the same without it, unless ranks become ready in another order."""

PASSES_ON = "waits for a collective by calling another function here"
HOST_COPY = "waits for a copy, in the line that another test leaves out"
NOT_REACHED: Mapping[str, str] = {
    "rank_communication.py:RankCommunication.wait": PASSES_ON,
    "deferred.py:DeferredBatchNorm.commit": PASSES_ON,
    "deferred.py:DeferredBatchNorm.finish_gather": PASSES_ON,
    "sync.py:ReplicaStatsGroup.gather": PASSES_ON,
    "compressed_collectives.py:_ScaledWork.wait": PASSES_ON,
    "device_commit.py:PendingCommit.read": HOST_COPY,
    "device_commit.py:PendingCommit.read_unequal_output": HOST_COPY,
    "device_commit.py:PendingCommit.result_of": HOST_COPY,
    "grad_check.py:_split_by_check": HOST_COPY,
    "full_state.py:gather_slices": "in several processes only, of tensors in host memory",
    "param_store.py:ParamStore.unshare": "of memory that replicas share on a host",
    "shared_params.py:SparseGradExchange.read_all": "of memory that replicas share on a host",
    "reducer.py:Reducer.wait": "in a traced step only, before another wait for the same collective",
    "sync.py:SyncBatchNormGroups.broadcast_stats": "only for members without samples",
}
"""Functions that wait, and why no case here leaves out their waits."""


def train(case, without=None):
    """Return losses, and the lines that waited for collectives; without the waits of one line."""
    plan = replace(Plan.parse(case.plan), passes=case.passes)
    world = StreamedWorld(plan.num_ranks, without)
    model = build(case.name).to(DEVICE.device)
    spec = OptimizerSpec(make_optimizer(case.name, case.plan), dict(model.named_parameters()))
    options = TrainingOptions(**case.options)
    ranks = LocalRanks(world, plan, model, F.cross_entropy, spec, options, world.accelerator)
    try:
        losses = []
        for number, batch in enumerate(itertools.islice(batches(case.name), 3)):
            source = SlicedBatch(batch, tuple(split_batch(len(batch[1]), plan.global_num_microbatches)))
            ranks.build(source.inputs(0), source.sizes[0])
            losses.append(ranks.step(number, source).loss)
        ranks.export_weights()
        DEVICE.require_no_races()
        numbers = [float(value.sum()) for value in model.state_dict().values()]
        return [*map(float, losses), *numbers], list(world.waits)
    finally:
        world.close()


def is_found(case, line, expected):
    """Return whether training fails, or gives other numbers, without the waits of a line."""
    try:
        numbers, _ = train(case, line)
    except Exception:  # noqa: BLE001 - values that have not arrived may be anything, and so may an error
        return True
    finally:
        gc.collect()  # what a failed run has held
        DEVICE.order.errors.clear()
    return numbers != expected


def find_waits(case):
    """Return the lines that waited in a case, and whether it is found that the waits of each are left out."""
    expected, lines = train(case)
    return {line: is_found(case, line, expected) for line in lines}


def functions_in(path):
    """Yield the functions of a source file, with the names of their classes."""
    for node in ast.parse(path.read_text()).body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, ast.FunctionDef):
                yield (
                    f"{path.name}:{node.name}.{function.name}" if function is not node else f"{path.name}:{node.name}",
                    function,
                )


def function_at(line):
    """Return the file and the name of the function that has a source line."""
    functions = functions_in(SOURCE / str(line).rpartition(":")[0])
    return next(name for name, function in functions if function.lineno <= line.number <= function.end_lineno)


def waiting_functions():
    """Return the file and the name of each function of the runtime that waits."""
    return {
        name
        for path in SOURCE.glob("runtime/**/*.py")
        for name, function in functions_in(path)
        if any(map(is_wait, ast.walk(function)))
    }


def is_wait(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait"
        and not node.args
        and not node.keywords
    )


@pytest.mark.long(quick=["Case(name='mlp', plan='data(2)'..."])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_wait_that_is_left_out_is_found(case):
    found = {line: is_found for line, is_found in find_waits(case).items() if function_at(line) not in BY_CHANCE}
    assert found
    assert all(found.values()), found


def test_what_the_host_reads_without_its_wait_is_found(monkeypatch):
    with DEVICE.count_host_waits() as waits:
        expected, _ = train(CASES[0])
    (line,) = {line for kind, line in waits if kind == "event"}  # the only one that waits for a copy
    monkeypatch.setattr(DEVICE, "left_out_line", line)
    assert is_found(CASES[0], None, expected)


@pytest.mark.slow
def test_every_wait_of_the_runtime_that_is_left_out_is_found():
    found: dict[SourceLine, bool] = {}
    for case in CASES:
        for line, is_one_found in find_waits(case).items():
            found[line] = found.get(line, False) or is_one_found
    reached = set(map(function_at, found))
    assert {function_at(line) for line, is_one_found in found.items() if not is_one_found} <= BY_CHANCE
    assert waiting_functions() - reached == NOT_REACHED.keys()
