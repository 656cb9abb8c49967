"""Trace one forward of a model with ``torch.export`` into operations that know which module calls they belong to.

A trace has the operations of the forward, and autograd differentiates these. Backwards that the model's author wrote
(a hook on a gradient, an ``autograd.Function``) are not operations and would be lost silently, so models with them are
rejected here.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves

from counterpoint.errors import PlanError
from counterpoint.partitioning.dry_run import (
    CallArgs,
    Inputs,
    KeptValues,
    ModuleAttributes,
    kept_value_hint,
    preserve_state,
    raise_batch_norm_error,
    split_call_args,
    training_mode,
)
from counterpoint.partitioning.fx_ops import assign_storage, copy_changed_values, mutated_inputs, note_bodies
from counterpoint.partitioning.hook_state import preserve_hook_stores
from counterpoint.partitioning.input_shapes import lift_sizes
from counterpoint.partitioning.module_casts import abort_forward
from counterpoint.partitioning.own_generators import OWN_DRAWS_RULE
from counterpoint.partitioning.partitioned_model import canonical_names
from counterpoint.partitioning.pytree import TensorTree, register_dataclasses, strip_unknown_leaves
from counterpoint.partitioning.stores import share_elements
from counterpoint.partitioning.tracing.lazy_networkx import without_networkx


@contextmanager
def silence_export() -> Iterator[None]:
    """Suppress the messages of torch's tracer: warnings, output and logs."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()), _filter_torch_logs():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _filter_torch_logs() -> Iterator[None]:
    """Filter torch's records from log handlers that write to a stream.

    They keep the stream of when torch was imported, so that redirecting stderr does not reach them.
    """
    names = [name for name in logging.root.manager.loggerDict if _is_torch_logger(name)]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    silenced = [handler for handler in handlers if type(handler) is logging.StreamHandler]
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


DIFFERENTIATION: frozenset[Callable[..., Any]] = frozenset(
    {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
)
"""Functions with which a forward differentiates what it computes."""
WHOLE_MODEL_RULE = "use a strategy that keeps the model whole (data, zero of level 1 or 2, server)"


class CustomBackwardDetector(TorchFunctionMode):
    """Records custom backwards: hooks on gradients, and ``autograd.Function`` nodes in the graphs it is shown.

    It also records the modules that differentiate in their forward.

    Args:
        open_calls: the paths of the modules that are running, innermost last.
    """

    def __init__(self, open_calls: Sequence[str]) -> None:
        super().__init__()
        self.open_calls = open_calls
        self.found: list[tuple[str, str]] = []
        self.differentiating: list[str] = []
        self.seen: set[Any] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Call the function, and record a hook on a tensor's gradient."""
        if func is Tensor.register_hook:
            self.record("a hook on a gradient, which its forward registers")
        if func in DIFFERENTIATION:
            self.differentiating.append(self.open_calls[-1] if self.open_calls else "")
        return func(*args, **(kwargs or {}))

    def inspect_graph(self, values: object) -> None:
        """Search the autograd graph of values for custom functions, up to nodes that were seen before."""
        queue: list[Any] = [leaf.grad_fn for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        while queue:
            node = queue.pop()
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            queue += [input_node for input_node, _ in node.next_functions]
            if isinstance(node, BackwardCFunction):
                function: type = vars(type(node))["_forward_cls"]
                if not function.__module__.startswith("torch._"):  # torch's own are operations of the trace
                    self.record(f"the autograd.Function {function.__name__}")

    def record(self, description: str) -> None:
        """Record a finding with the module that is running."""
        self.found.append((self.open_calls[-1] if self.open_calls else "", description))

    def require_none(self, model: nn.Module) -> None:
        """Check that no custom backward was found.

        Raises:
            PlanError: one was; the first is named.
        """
        self.require_no_differentiation(model)
        if self.found:
            path, what = self.found[0]
            raise _custom_backward_error(model, path, what)

    def require_no_differentiation(self, model: nn.Module) -> None:
        """Check that the forward does not differentiate.

        Raises:
            PlanError: it does.
        """
        if self.differentiating:
            raise PlanError(
                f"{_locate(model, self.differentiating[0])} differentiates in its forward (torch.autograd), but a "
                "model is split along the operations of its forward, and the computation of gradients is none of them; "
                f"{WHOLE_MODEL_RULE}"
            )


def _locate(model: nn.Module, path: str) -> str:
    return f"module '{path}' ({type(model.get_submodule(path)).__name__})" if path else type(model).__name__


def require_no_backward_hooks(model: nn.Module) -> None:
    """Check that no module of a model to be traced has backward hooks.

    Raises:
        PlanError: one has.
    """
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - there is no other way to see them
            raise _custom_backward_error(model, path, "a hook on its backward")


def _custom_backward_error(model: nn.Module, path: str, description: str) -> PlanError:
    return PlanError(
        f"{_locate(model, path)} has {description}, but a model is split along the operations of its forward, whose "
        "own gradients would be used instead; write it as an operation (torch.library.custom_op with "
        "register_autograd), or with detach(), make the model an nn.Sequential, whose children run unchanged, or "
        f"{WHOLE_MODEL_RULE}"
    )


PACKAGE_DIR = str(Path(__file__).parent)
TORCH_DIR = str(Path(torch.__file__).parent)
_DTYPE_CHECK = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001 - it has no public name
MASK_CHECK = "_detect_is_causal_mask"
"""Where torch's transformers look at the values of a mask."""


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A traced forward, for inputs of one signature.

    Args:
        graph: the operations; they read parameters, buffers and constants by ``get_attr``.
        constants: tensors and inner graphs that belong to the trace itself, by ``get_attr`` target.
        params: the first name in the model, for each node that reads a parameter; in a dtype of its own if the node
            has one, see :func:`read_dtype`.
        buffers: the first name in the model, for each node that reads a buffer.
        inputs: the node of each leaf of the inputs.
        output_tree: the structure of the output.
        sizes: the expression, in symbols of the inputs' dims, for each node that is a size.
    """

    graph: fx.Graph
    constants: dict[str, Any]
    params: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    inputs: tuple[fx.Node, ...]
    output_tree: TensorTree
    sizes: dict[fx.Node, Any]

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The node of each tensor of the output, in order."""
        leaves, _ = tree_flatten(self.graph.output_node().args[0])
        return tuple(leaf for leaf in leaves if isinstance(leaf, fx.Node))


class CreatedParameters:
    """Finds parameters that a forward creates, as one that does so in its first call.

    Args:
        model: before the forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.known = {path: set(module._parameters) for path, module in self._modules()}  # noqa: SLF001

    def _modules(self) -> list[tuple[str, nn.Module]]:
        modules = self.model.named_modules()
        return [(path, module) for path, module in modules if not isinstance(module, torch.jit.ScriptModule)]

    def require_none(self) -> None:
        """Remove parameters that were created, which are those of a trace.

        Raises:
            PlanError: there are some.
        """
        names = [
            f"{path}.{name}".lstrip(".")
            for path, module in self._modules()
            for name in module._parameters.keys() - self.known.get(path, set())  # noqa: SLF001
        ]
        for name in names:
            path, _, own_name = name.rpartition(".")
            delattr(self.model.get_submodule(path), own_name)
        if names:
            raise PlanError(
                f"the forward of {type(self.model).__name__} creates the parameter {min(names)}, which the optimizer "
                "does not have and a trace cannot keep; create it in __init__, or run the model on a batch before the "
                "optimizer is made"
            )


def export_graph(
    model: nn.Module, inputs: Inputs, *, training: bool, varying_dims: Collection[tuple[int, int]] = ()
) -> TracedGraph:
    """Trace ``model(*inputs)``; the model is not changed.

    Args:
        model: the model.
        inputs: the arguments of its forward.
        training: in which mode.
        varying_dims: tensor and dim of the sizes that become symbols; the forward may still fix some of them.

    Raises:
        PlanError: the forward depends on tensor values, does what operations on tensors cannot show, or has a custom
            backward.
    """
    args, kwargs = split_call_args(inputs)
    require_no_backward_hooks(model)
    created = CreatedParameters(model)
    open_calls: list[str] = []
    detector = CustomBackwardDetector(open_calls)
    kept_values, attributes = KeptValues(model), ModuleAttributes(model)
    tracking = _track_calls(model, open_calls, detector, kept_values)
    hooks = preserve_hook_stores(model)
    with training_mode(model, training=training), hooks, tracking as stripped_types, silence_export(), detector:
        _require_fixed_momentum(model)
        try:
            with without_networkx():
                program = torch.export.export(
                    model, args, kwargs, dynamic_shapes=_dynamic_shapes((args, kwargs), varying_dims), strict=False
                )
            module = program.module()
        except Exception as error:
            abort_forward(model)
            created.require_none()
            detector.require_no_differentiation(model)
            raise_batch_norm_error(error, f"{type(model).__name__}, traced on an example microbatch")
            _run_eagerly(model, inputs, training=training)
            raise PlanError(_explain_error(model, error, open_calls)) from error
    created.require_none()
    detector.require_none(model)
    kept_values.restore()
    attributes.restore()
    if kept_values.found:
        raise PlanError(
            f"the forward of {type(model).__name__} keeps a differentiable value in its attribute "
            f"{kept_values.names[0]}, but a model is split along the operations of its forward, so a loss that reads "
            f"the attribute would not see it; {kept_value_hint(model, kept_values.names[0])}"
            "return the value from forward together with the output, or use a strategy that keeps the model whole "
            "(data, zero of level 1 or 2, server)"
        )
    if stripped_types:
        module.graph.eliminate_dead_code()
    _require_no_own_generators(module, model)
    _require_no_transforms(module, model)
    _require_known_sizes(module, model)
    traced = _parse_module(module, canonical_names(model), model)
    _require_no_outer_autocast(traced, model)
    _require_no_param_constants(traced, model)
    return traced


def _require_no_own_generators(module: fx.GraphModule, model: nn.Module) -> None:
    """Reject draws from another generator than torch's global one, which a trace would repeat."""
    for node in module.graph.nodes:
        if node.kwargs.get("generator") is not None:
            location = _locate(model, innermost_module(node))
            raise PlanError(f"the forward of {location} draws from a generator of its own, {OWN_DRAWS_RULE}")


def _require_no_transforms(module: fx.GraphModule, model: nn.Module) -> None:
    """Reject values of the transforms of ``torch.func``, such as ``vmap``, which only exist inside of them."""
    for node in module.graph.nodes:
        values = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
        if node.op == "call_function" and not all(isinstance(value, FakeTensor) for value in values):
            raise PlanError(
                f"{_locate(model, innermost_module(node))} computes with a transform of torch.func, such as vmap, but "
                "a model is split along operations on whole tensors; write the forward for a batch of samples, or "
                f"{WHOLE_MODEL_RULE}"
            )


def _require_known_sizes(module: fx.GraphModule, model: nn.Module) -> None:
    """Reject operations whose result has a size that depends on values, such as ``nonzero``."""
    # imports sympy, 36 MB and 0.6 s, which ranks that trace nothing do without
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in module.graph.nodes:
        if any(map(free_unbacked_symbols, tree_leaves(node.meta.get("val")))):
            location = _locate(model, innermost_module(node))
            raise PlanError(
                f"the result of {node.target} in {location} has a size that depends on values, but a model is split "
                "along operations whose sizes depend on those of its inputs alone; train it with a strategy that keeps "
                "the model whole (data, zero of level 1 or 2, server), multiply with a mask instead of selecting, or "
                "make the model an nn.Sequential, whose children may contain any code"
            )


def _dynamic_shapes(call: CallArgs, varying_dims: Collection[tuple[int, int]]) -> Any:  # noqa: ANN401 - not typed right
    """Return the dims that torch traces as symbols; None if there are none."""
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for index in {index for index, _ in varying_dims}:
        shapes[tensors[index]] = {dim: torch.export.Dim.AUTO for number, dim in varying_dims if number == index}
    return shapes if varying_dims else None


def _require_fixed_momentum(model: nn.Module) -> None:
    """Reject batch norm with ``momentum=None``, which reads its averaging factor from a tensor."""
    for path, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - what all of them are
        if is_norm and module.training and module.track_running_stats and module.momentum is None:
            location = f"module '{path}' ({type(module).__name__})" if path else type(module).__name__
            raise PlanError(
                f"{location} has momentum=None, by which it averages over all batches and divides by a number that it "
                "reads from a tensor, but a model is split along operations that do not depend on values; give it a "
                "number, such as momentum=0.1, or make the model an nn.Sequential, whose children run unchanged, or "
                "use a strategy that keeps the model whole (data, zero of level 1 or 2, server)"
            )


def _require_no_outer_autocast(traced: TracedGraph, model: nn.Module) -> None:
    """Reject a forward that runs in one ``autocast`` as a whole, which a trace shows as one operation."""
    readers = {user for source in traced.params for user in source.users}
    if len(readers) == 1 and getattr(readers.pop().target, "__name__", "") == "wrap_with_autocast":
        raise PlanError(
            f"all of {type(model).__name__}.forward runs inside torch.autocast, which a trace shows as one operation, "
            "so it cannot be split; enter autocast in the forward of each block instead, or use a strategy that keeps "
            "the model whole (data, zero of level 1 or 2, server)"
        )


def _require_no_param_constants(traced: TracedGraph, model: nn.Module) -> None:
    """Reject constants in the memory of a parameter, which a forward reads from a list or a closure, for instance."""
    names = {param.untyped_storage().data_ptr(): name for name, param in model.named_parameters() if param.numel()}
    for constant in traced.constants.values():
        if not isinstance(constant, Tensor) or constant.layout != torch.strided or not constant.numel():
            continue
        name = names.get(constant.untyped_storage().data_ptr())
        if name is not None:
            raise PlanError(
                f"the forward of {type(model).__name__} reads {name} from a place where a trace does not know it as a "
                "parameter (a list, a closure, an attribute with its values), so that it would be a constant; read it "
                "as an attribute of its module, keep several in nn.ParameterList or nn.ParameterDict, or "
                f"{WHOLE_MODEL_RULE}"
            )


def _run_eagerly(model: nn.Module, inputs: Inputs, *, training: bool) -> None:
    """Raise the model's own error, if it cannot run these inputs at all."""
    args, kwargs = split_call_args(inputs)
    with preserve_state(model, training=training), torch.enable_grad():  # for a forward that differentiates
        model(*args, **kwargs)


@contextmanager
def _track_calls(
    model: nn.Module, open_calls: list[str], detector: CustomBackwardDetector, kept_values: KeptValues
) -> Iterator[list[str]]:
    """Track the paths of running modules, and search for custom backwards in what they take and return.

    In the end, values are found that the forward keeps; the tracer removes them.

    Output leaves that no trace can show are stripped; the list then names the output's type.
    """
    stripped_types: list[str] = []

    def enter(path: str, module: nn.Module, args: object) -> None:
        detector.inspect_graph(args)
        open_calls.append(path)

    def leave(module: nn.Module, args: object, output: object) -> object:
        detector.inspect_graph(output)
        open_calls.pop()
        if not open_calls:
            kept_values.find()
            with suppress(ValueError):  # of a dataclass that torch cannot build from its fields
                register_dataclasses(output)
        stripped = output if open_calls else strip_unknown_leaves(output)
        if stripped is not output:
            stripped_types.append(type(output).__name__)
        return stripped

    hooks = []
    for path, module in model.named_modules():
        hooks += [
            module.register_forward_pre_hook(partial(enter, path)),
            module.register_forward_hook(leave),
        ]
    try:
        yield stripped_types
    finally:
        for hook in hooks:
            hook.remove()


FAKE_CONSTANT = "fake tensor in the exported program constant's list"
"""In torch's error for a tensor that an operation outside of the trace has made."""


def _explain_error(model: nn.Module, error: Exception, open_calls: list[str]) -> str:
    """Describe why tracing failed, with the module and the user's line of code."""
    location = _locate(model, open_calls[-1] if open_calls else "")
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith((PACKAGE_DIR, TORCH_DIR, "<"))]
    code_line = (
        f" at {user_frames[-1].filename}:{user_frames[-1].lineno} '{user_frames[-1].line}'" if user_frames else ""
    )
    reason = str(error).strip().splitlines() or [type(error).__name__]
    if any(frame.name == MASK_CHECK for frame in frames):
        return (
            f"tracing the model stopped in {location}{code_line}: torch compares the values of its mask with those of "
            "a causal one, but a model is split along operations that do not depend on values; state what the mask is: "
            "also pass is_causal=True or is_causal=False (tgt_is_causal= to a decoder)"
        )
    if FAKE_CONSTANT in reason[0]:
        return (
            f"tracing the model stopped in {location}: its forward writes to a tensor through .data, or keeps one, "
            "where a trace does not see it; write to the buffer itself (self.buffer.copy_(...), mul_() or add_()), or "
            "replace it (self.buffer = ...), or use a strategy that keeps the model whole (data, zero of level 1 or 2, "
            "server)"
        )
    return (
        f"tracing the model stopped in {location}{code_line}: {reason[0].strip()}; "
        "a model is split along the tensor operations of its forward, which must not depend on the values; "
        "train it with a strategy that keeps the model whole (data, zero of level 1 or 2, server), write the choice "
        "with torch.where, or make the model an nn.Sequential, whose children may contain any code"
    )


def _parse_module(module: fx.GraphModule, first_name: dict[str, str], model: nn.Module) -> TracedGraph:
    """Sort the attributes of the exported module into parameters, buffers and constants.

    A constant that is a buffer of the model, in another attribute of it or in a list, is read as that buffer. Constants
    that the forward changes in place are copied in each run, because several ranks and microbatches run one trace.
    """
    graph = module.graph
    params: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    constants: dict[str, Any] = {}
    param_names = dict(module.named_parameters(remove_duplicate=False))
    model_buffers = list(model.named_buffers())
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target is _DTYPE_CHECK:
            # the tracer's check of shapes, which segments check themselves, and that of a dtype that is cast, which an
            # autocast may change
            graph.erase_node(node)
        elif node.op == "get_attr":
            target = str(node.target)
            if target in param_names:
                params[node] = first_name[target]
            elif target in first_name:
                buffers[node] = first_name[target]
            else:
                constants[target] = _get_attribute(module, target)
    for target, value in list(constants.items()):
        name = _find_buffer(value, model_buffers)
        if name:
            buffers |= dict.fromkeys(graph.find_nodes(op="get_attr", target=target), first_name[name])
            del constants[target]
    _read_buffers_once(buffers)
    _fold_param_casts(graph, params)
    note_bodies(module, graph)
    _require_no_changed_views(graph, buffers, constants, model)
    _copy_changed_constants(graph, constants, model)
    inputs = tuple(node for node in graph.nodes if node.op == "placeholder")
    sizes = lift_sizes(graph, inputs)
    output = graph.output_node()
    leaves, _ = tree_flatten(output.args[0])
    indices = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, fx.Node))
    spec = vars(module)["_out_spec"]
    return TracedGraph(
        graph,
        constants,
        params,
        buffers,
        inputs,
        TensorTree(spec, tuple(None if isinstance(leaf, fx.Node) else leaf for leaf in leaves), indices),
        sizes,
    )


def _find_buffer(constant: object, buffers: Sequence[tuple[str, Tensor]]) -> str:
    """Return the name of the buffer whose memory a constant of the trace has; empty if there is no such buffer."""
    if not _has_memory(constant):
        return ""
    sharing = [(name, one) for name, one in buffers if _has_memory(one) and _storage_of(one) == _storage_of(constant)]
    for name, one in sharing:
        if (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
            constant.data_ptr(), constant.shape, constant.stride(), constant.dtype
        ):  # fmt: skip
            return name
    return ""


def _require_no_changed_views(
    graph: fx.Graph, buffers: Mapping[fx.Node, str], constants: Mapping[str, object], model: nn.Module
) -> None:
    """Reject constants that are views of a buffer, if the forward changes either.

    Raises:
        PlanError: there is one.
    """
    storage = assign_storage(graph)
    changed = {storage[source] for node in graph.nodes for source in mutated_inputs(node)}
    changed_buffers = {name for node, name in buffers.items() if storage[node] in changed}
    tensors = [(name, buffer) for name, buffer in model.named_buffers() if _has_memory(buffer)]
    for node in graph.find_nodes(op="get_attr"):
        view = constants.get(str(node.target))
        if not _has_memory(view):
            continue
        for name, buffer in tensors:
            is_changed = name in changed_buffers or storage[node] in changed
            if is_changed and _overlap(buffer, view):
                raise PlanError(
                    f"the forward of {type(model).__name__} changes the buffer {name}, and reads it also from a tensor "
                    "that is a view of it, kept where a trace does not know it as a buffer (an attribute, a list, a "
                    "closure), so that it would be a constant; take the view in the forward, as self.buffer[:4], or "
                    f"{WHOLE_MODEL_RULE}"
                )


def _has_memory(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.numel() > 0 and not value.is_meta


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Tell whether two tensors have memory in common, which disjoint parts of one storage have not."""
    return _storage_of(first) == _storage_of(second) and share_elements(first, second)


def _read_buffers_once(buffers: dict[fx.Node, str]) -> None:
    """Let all operations read a buffer by one node, so that a change in place is seen by those that come later."""
    first: dict[str, fx.Node] = {}
    for node, name in [(node, buffers[node]) for node in _in_order(buffers)]:
        if name in first:
            node.replace_all_uses_with(first[name])
            node.graph.erase_node(node)
            del buffers[node]
        first.setdefault(name, node)


def _in_order(nodes: Collection[fx.Node]) -> list[fx.Node]:
    return [node for node in next(iter(nodes)).graph.nodes if node in nodes] if nodes else []


def _copy_changed_constants(graph: fx.Graph, constants: Mapping[str, object], model: nn.Module) -> None:
    """Copy constants that the forward changes in place.

    Raises:
        PlanError: another constant is in the memory of one.
    """
    read = {node: constants[str(node.target)] for node in graph.find_nodes(op="get_attr") if node.target in constants}
    for node in copy_changed_values(graph, [node for node, value in read.items() if isinstance(value, Tensor)]):
        changed = read.pop(node)
        if any(_has_memory(one) and _has_memory(changed) and _overlap(one, changed) for one in read.values()):
            raise PlanError(
                f"the forward of {type(model).__name__} changes a tensor in place that it also reads from another "
                "place, as a view of it or in another attribute, and a trace knows both only as constants; register it "
                f"as a buffer (register_buffer) and take views of it in the forward, or {WHOLE_MODEL_RULE}"
            )


def _fold_param_casts(graph: fx.Graph, params: dict[fx.Node, str]) -> None:
    """Let nodes read a parameter in another dtype, instead of an operation that casts it: then it is one layer's."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
        param, *rest = node.args
        if param not in params or len(rest) != 1 or node.kwargs or rest[0] == param.meta["val"].dtype:
            continue
        with graph.inserting_before(node):
            read = graph.create_node("get_attr", param.target)
        read.meta = {**node.meta, "read_dtype": rest[0]}
        params[read] = params[param]
        node.replace_all_uses_with(read)
        graph.erase_node(node)


def read_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype that a node reads a parameter in, if it is not that of the parameter."""
    dtype: torch.dtype | None = node.meta.get("read_dtype")
    return dtype


def _get_attribute(module: nn.Module, target: str) -> Any:  # noqa: ANN401
    value: Any = module
    for name in target.split("."):
        value = getattr(value, name)
    return value


def module_calls(node: fx.Node) -> list[tuple[str, int]]:
    """Return the module calls around an operation, outermost first: path and number of the call."""
    calls = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, count = str(key).rpartition("@")
        calls.append((path, int(count) if count.isdigit() and "@" in str(key) else 0))
    return calls


def innermost_module(node: fx.Node) -> str:
    """Return the path of the innermost module that an operation belongs to."""
    calls = module_calls(node)
    return calls[-1][0] if calls else ""
