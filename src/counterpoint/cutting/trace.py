"""One forward of a model as a list of tensor operations, each knowing the calls of modules it stands in."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from counterpoint.cutting.cut import canonical_names
from counterpoint.cutting.eager import Inputs, call_of, mode_of, require_variance, unmarked
from counterpoint.cutting.leaves import Nest, known_of
from counterpoint.cutting.ops import draws_random
from counterpoint.cutting.quiet import quiet
from counterpoint.cutting.unloaded import without_graph_library
from counterpoint.cutting.unseen import OwnBackwards, require_no_backward_hooks
from counterpoint.errors import PlanError

OUR_FOLDER = str(Path(__file__).parent)
TORCH_FOLDER = str(Path(torch.__file__).parent)
MASK_CHECK = "_detect_is_causal_mask"
"""Where torch's transformers look at the values of a mask."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced forward, for inputs of one signature.

    Args:
        graph: the operations; they read parameters, buffers and constants by ``get_attr``.
        constants: the tensors and inner graphs that belong to the trace itself, by ``get_attr`` target.
        params: the first name in the model, for each node that reads a parameter.
        buffers: the first name in the model, for each node that reads a buffer.
        inputs: the node of each leaf of the inputs.
        nest: how the output is nested.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    params: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    inputs: tuple[fx.Node, ...]
    nest: Nest

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The node of each tensor of the output, in order."""
        leaves, _ = tree_flatten(self.graph.output_node().args[0])
        return tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))


def trace(model: nn.Module, inputs: Inputs, *, training: bool) -> Traced:
    """Return the operations of ``model(*inputs)``; the model stays as it is.

    Raises:
        PlanError: the forward depends on values, or does what cannot be seen in operations on tensors; or the backward
            is not that of these operations.
    """
    args, kwargs = call_of(inputs)
    require_no_backward_hooks(model)
    open_calls: list[str] = []
    backwards = OwnBackwards(open_calls)
    tracked = _tracked(model, open_calls, backwards)
    with mode_of(model, training=training), tracked as left_out, quiet(), backwards:
        _require_steady_norms(model)
        try:
            with without_graph_library():
                program = torch.export.export(model, args, kwargs, strict=False)
            module = program.module()
        except Exception as error:
            require_variance(error, f"{type(model).__name__}, traced on an example microbatch")
            _run_eagerly(model, inputs, training=training)
            raise PlanError(_explain(model, error, open_calls)) from error
    backwards.require_none(model)
    if left_out:
        module.graph.eliminate_dead_code()
    traced = _read(module, canonical_names(model))
    _require_open(traced, model)
    return traced


def _require_steady_norms(model: nn.Module) -> None:
    """Refuse batch norm whose factor for its running statistics is a number that it reads from a tensor."""
    for path, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - what all of them are
        if is_norm and module.training and module.track_running_stats and module.momentum is None:
            where = f"module '{path}' ({type(module).__name__})" if path else type(module).__name__
            raise PlanError(
                f"{where} has momentum=None, by which it averages over all batches and divides by a number that it "
                "reads from a tensor, but a model is cut along operations that do not depend on values; give it a "
                "number, as momentum=0.1, or make the model an nn.Sequential, whose children are run as they are, or "
                "take a strategy that needs no cut (data, zero of level 1 or 2, server)"
            )


def _require_open(traced: Traced, model: nn.Module) -> None:
    """Refuse a forward that stands in an autocast as a whole."""
    readers = {user for source in traced.params for user in source.users}
    if len(readers) == 1 and getattr(readers.pop().target, "__name__", "") == "wrap_with_autocast":
        raise PlanError(
            f"all of {type(model).__name__}.forward runs inside torch.autocast, which a trace shows as one operation, "
            "so there is nothing to cut; enter autocast in the forward of each block instead, or take a strategy that "
            "needs no cut (data, zero of level 1 or 2, server)"
        )


def _run_eagerly(model: nn.Module, inputs: Inputs, *, training: bool) -> None:
    """Raise the model's own error, where it cannot run these inputs at all."""
    args, kwargs = call_of(inputs)
    with unmarked(model, training=training):
        model(*args, **kwargs)


@contextmanager
def _tracked(model: nn.Module, open_calls: list[str], backwards: OwnBackwards) -> Iterator[list[str]]:
    """Keep the paths of the modules whose calls have begun and not ended, and look at what leads to them.

    The model's output comes out without what no trace can show; the list then has the output's type.
    """
    left_out: list[str] = []

    def enter(path: str, module: nn.Module, args: object) -> None:
        backwards.look(args)
        open_calls.append(path)

    def leave(module: nn.Module, args: object, output: object) -> object:
        backwards.look(output)
        open_calls.pop()
        known = output if open_calls else known_of(output)
        if known is not output:
            left_out.append(type(output).__name__)
        return known

    hooks = []
    for path, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(partial(enter, path)),
            module.register_forward_hook(leave),
        ]
    try:
        yield left_out
    finally:
        for hook in hooks:
            hook.remove()


def _explain(model: nn.Module, error: Exception, open_calls: list[str]) -> str:
    path = open_calls[-1] if open_calls else ""
    where = f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith((OUR_FOLDER, TORCH_FOLDER, "<"))]
    place = f" at {foreign[-1].filename}:{foreign[-1].lineno} '{foreign[-1].line}'" if foreign else ""
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if any(frame.name == MASK_CHECK for frame in frames):
        return (
            f"tracing the model stopped in {where}{place}: torch compares the values of its mask with those of a "
            "causal one, but a model is cut along operations that do not depend on values; say what the mask is: pass "
            "is_causal=True or is_causal=False beside it (tgt_is_causal= to a decoder)"
        )
    return (
        f"tracing the model stopped in {where}{place}: {reason[0].strip()}; "
        "a model is cut along the tensor operations of its forward, which must not depend on the values; "
        "train it with a strategy that needs no cut (data, zero of level 1 or 2, server), write the choice with "
        "torch.where, or make the model an nn.Sequential whose children may do what they like"
    )


def _read(module: fx.GraphModule, first_name: dict[str, str]) -> Traced:
    """Sort what the exported module holds into the model's own tensors, constants, inputs and outputs."""
    graph = module.graph
    params: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    constants: dict[str, Any] = {}
    own = dict(module.named_parameters(remove_duplicate=False))
    for node in list(graph.nodes):
        if node.op == "call_module":  # the tracer's check of shapes; ours is by signature
            graph.erase_node(node)
        elif node.op == "get_attr":
            target = str(node.target)
            if target in own:
                params[node] = first_name[target]
            elif target in first_name:
                buffers[node] = first_name[target]
            else:
                constants[target] = _attribute(module, target)
    for node in graph.find_nodes(op="get_attr"):
        inner = constants.get(str(node.target))
        if isinstance(inner, fx.GraphModule):  # the body of a no_grad or an autocast
            node.meta["draws"] = any(draws_random(operation) for operation in inner.graph.nodes)
    output = graph.output_node()
    leaves, _ = tree_flatten(output.args[0])
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node))
    spec = vars(module)["_out_spec"]
    return Traced(
        graph,
        constants,
        params,
        buffers,
        tuple(node for node in graph.nodes if node.op == "placeholder"),
        Nest(spec, tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves), places),
    )


def _attribute(module: nn.Module, target: str) -> Any:  # noqa: ANN401
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def calls_of(node: fx.Node) -> list[tuple[str, int]]:
    """Return the calls of modules that an operation stands in, outermost first: path and number of the call."""
    calls = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, count = str(key).rpartition("@")
        calls.append((path, int(count) if count.isdigit() and "@" in str(key) else 0))
    return calls


def path_of(node: fx.Node) -> str:
    """Return the path of the innermost module that an operation stands in."""
    calls = calls_of(node)
    return calls[-1][0] if calls else ""
