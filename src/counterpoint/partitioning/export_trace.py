"""Torch's tracer without what it says about its own working, in warnings, on the terminal and in logs.

What a trace does not show: backwards that the model's author wrote. They would be lost without a word.

A trace has the operations of a forward, and autograd differentiates these. A hook on a gradient, or the backward of an
``autograd.TorchFunction``, is none of them.

One forward of a model as a list of tensor operations, each knowing the calls of modules it stands in.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import (
    Inputs,
    preserve_state,
    raise_batch_norm_error,
    split_call_args,
    training_mode,
)
from counterpoint.partitioning.fx_ops import is_random_op
from counterpoint.partitioning.lazy_networkx import without_networkx
from counterpoint.partitioning.partitioned_model import canonical_names
from counterpoint.partitioning.pytree import TensorTree, strip_unknown_leaves


@contextmanager
def silence_export() -> Iterator[None]:
    """Keep what the tracer says about its own working off the user's terminal."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()), _filter_torch_logs():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _filter_torch_logs() -> Iterator[None]:
    """Have handlers of torch's loggers that write to a stream let nothing of torch's through.

    They hold the stream that was the process's when torch was loaded, so that a redirection does not reach them.
    """
    names = [name for name in logging.root.manager.loggerDict if _is_torch_logger(name)]
    found = {handler for name in names for handler in logging.getLogger(name).handlers}
    silenced = [handler for handler in found if type(handler) is logging.StreamHandler]
    for handler in silenced:
        handler.addFilter(_is_not_torch_record)
    try:
        yield
    finally:
        for handler in silenced:
            handler.removeFilter(_is_not_torch_record)


def _is_torch_logger(name: str) -> bool:
    return name.split(".", 1)[0] == "torch"


def _is_not_torch_record(record: logging.LogRecord) -> bool:
    return not _is_torch_logger(record.name)


class CustomBackwardDetector(TorchFunctionMode):
    """While this is active and is shown what modules take and give, it notes the backwards that are written.

    Args:
        open_calls: the paths of the modules that are running, innermost last.
    """

    def __init__(self, open_calls: Sequence[str]) -> None:
        super().__init__()
        self.open_calls = open_calls
        self.found: list[tuple[str, str]] = []
        self.seen: set[Any] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function, and note a hook on a tensor's gradient."""
        if func is Tensor.register_hook:
            self.record("a hook on a gradient, which its forward registers")
        return func(*args, **(kwargs or {}))

    def inspect_graph(self, values: object) -> None:
        """Look at what led to values, since the last ones, in the module that is running."""
        queue: list[Any] = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        while queue:
            node = queue.pop()
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            queue += [before for before, _ in node.next_functions]
            if isinstance(node, BackwardCFunction):
                kind: type = vars(type(node))["_forward_cls"]
                if not kind.__module__.startswith("torch._"):  # those of operations that the trace has as such
                    self.record(f"the autograd.Function {kind.__name__}")

    def record(self, description: str) -> None:
        """Keep what was found, and in which module."""
        self.found.append((self.open_calls[-1] if self.open_calls else "", description))

    def require_none(self, model: nn.Module) -> None:
        """Check that nothing was found.

        Raises:
            PlanError: something was; the first is named.
        """
        if self.found:
            path, what = self.found[0]
            raise _custom_backward_error(model, path, what)


def require_no_backward_hooks(model: nn.Module) -> None:
    """Check that no module of a model that is to be traced has hooks on its backward.

    Raises:
        PlanError: one has.
    """
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - there is no other way to see them
            raise _custom_backward_error(model, path, "a hook on its backward")


def _custom_backward_error(model: nn.Module, path: str, description: str) -> PlanError:
    where = f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__
    return PlanError(
        f"{where} has {description}, but a model is cut along the operations of its forward, whose own gradients would be "
        "taken instead; write it as an operation (torch.library.custom_op with register_autograd), or with detach(), "
        "make the model an nn.Sequential, whose children are run as they are, or take a strategy that needs no cut "
        "(data, zero of level 1 or 2, server)"
    )


PACKAGE_DIR = str(Path(__file__).parent)
TORCH_DIR = str(Path(torch.__file__).parent)
MASK_CHECK = "_detect_is_causal_mask"
"""Where torch's transformers look at the values of a mask."""


@dataclass(frozen=True, slots=True)
class TracedGraph:
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
    output_tree: TensorTree

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The node of each tensor of the output, in order."""
        leaves, _ = tree_flatten(self.graph.output_node().args[0])
        return tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))


def export_graph(model: nn.Module, inputs: Inputs, *, training: bool) -> TracedGraph:
    """Return the operations of ``model(*inputs)``; the model stays as it is.

    Raises:
        PlanError: the forward depends on values, or does what cannot be seen in operations on tensors; or the backward
            is not that of these operations.
    """
    args, kwargs = split_call_args(inputs)
    require_no_backward_hooks(model)
    open_calls: list[str] = []
    backwards = CustomBackwardDetector(open_calls)
    tracked = _track_calls(model, open_calls, backwards)
    with training_mode(model, training=training), tracked as left_out, silence_export(), backwards:
        _require_fixed_momentum(model)
        try:
            with without_networkx():
                program = torch.export.export(model, args, kwargs, strict=False)
            module = program.module()
        except Exception as error:
            raise_batch_norm_error(error, f"{type(model).__name__}, traced on an example microbatch")
            _run_eagerly(model, inputs, training=training)
            raise PlanError(_explain_error(model, error, open_calls)) from error
    backwards.require_none(model)
    if left_out:
        module.graph.eliminate_dead_code()
    traced = _parse_module(module, canonical_names(model))
    _require_no_outer_autocast(traced, model)
    return traced


def _require_fixed_momentum(model: nn.Module) -> None:
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


def _require_no_outer_autocast(traced: TracedGraph, model: nn.Module) -> None:
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
    args, kwargs = split_call_args(inputs)
    with preserve_state(model, training=training):
        model(*args, **kwargs)


@contextmanager
def _track_calls(model: nn.Module, open_calls: list[str], detector: CustomBackwardDetector) -> Iterator[list[str]]:
    """Keep the paths of the modules whose calls have begun and not ended, and look at what leads to them.

    The model's output comes out without what no trace can show; the list then has the output's type.
    """
    left_out: list[str] = []

    def enter(path: str, module: nn.Module, args: object) -> None:
        detector.inspect_graph(args)
        open_calls.append(path)

    def leave(module: nn.Module, args: object, output: object) -> object:
        detector.inspect_graph(output)
        open_calls.pop()
        known = output if open_calls else strip_unknown_leaves(output)
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


def _explain_error(model: nn.Module, error: Exception, open_calls: list[str]) -> str:
    path = open_calls[-1] if open_calls else ""
    where = f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith((PACKAGE_DIR, TORCH_DIR, "<"))]
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


def _parse_module(module: fx.GraphModule, first_name: dict[str, str]) -> TracedGraph:
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
                constants[target] = _get_attribute(module, target)
    for node in graph.find_nodes(op="get_attr"):
        inner = constants.get(str(node.target))
        if isinstance(inner, fx.GraphModule):  # the body of a no_grad or an autocast
            node.meta["draws"] = any(is_random_op(operation) for operation in inner.graph.nodes)
    output = graph.output_node()
    leaves, _ = tree_flatten(output.args[0])
    places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node))
    spec = vars(module)["_out_spec"]
    return TracedGraph(
        graph,
        constants,
        params,
        buffers,
        tuple(node for node in graph.nodes if node.op == "placeholder"),
        TensorTree(spec, tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves), places),
    )


def _get_attribute(module: nn.Module, target: str) -> Any:  # noqa: ANN401
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def module_calls(node: fx.Node) -> list[tuple[str, int]]:
    """Return the calls of modules that an operation stands in, outermost first: path and number of the call."""
    calls = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, count = str(key).rpartition("@")
        calls.append((path, int(count) if count.isdigit() and "@" in str(key) else 0))
    return calls


def innermost_module(node: fx.Node) -> str:
    """Return the path of the innermost module that an operation stands in."""
    calls = module_calls(node)
    return calls[-1][0] if calls else ""
