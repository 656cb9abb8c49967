"""Traces and programs that tests build again and again: for models of one description they are built once per process."""

import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from counterpoint.compiler.compile import compile  # noqa: A004 - as the library names it
from counterpoint.partitioning.dry_run import split_call_args, training_mode
from counterpoint.partitioning.tracing.export_trace import TracedGraph, export_graph

PLAIN = (
    *(bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type),
    *(FunctionType, BuiltinFunctionType),
)
TRACES: dict[Any, TracedGraph] = {}
MAX_TRACES = 200
MAX_PROGRAMS = 500


@pytest.fixture(autouse=True)
def _share_traces(monkeypatch):
    """A model that many tests train under many plans is traced once; a conftest imports this for its folder."""
    if (traced := sys.modules.get("counterpoint.partitioning.tracing.traced")) is not None:
        monkeypatch.setattr(traced, "export_graph", export_or_share)
    if (run_compiler := sys.modules.get("counterpoint.training.ranks.run_compiler")) is not None:
        monkeypatch.setattr(run_compiler, "compile", compile_or_share)


@lru_cache(MAX_PROGRAMS)
def compile_once(plan, model, samples_per_micro):
    """A program is a function of frozen values, and is one itself."""
    return compile(plan, model, samples_per_micro=samples_per_micro)


def compile_or_share(plan, model, *, samples_per_micro):
    """Compile as ``compile`` does, once for equal plans and models; the place that a plan was read from is its own."""
    return replace(compile_once(plan, model, samples_per_micro), plan=plan)


class UnknownValueError(Exception):
    """A model has a value whose equality says nothing about the model."""


def export_or_share(model, inputs, *, training, varying_dims=()):
    """Trace as ``export_graph`` does, or return a copy of the trace of a model that was described equally."""
    key: Any = None
    with suppress(UnknownValueError):
        key = describe(model, inputs, training=training), frozenset(varying_dims)
    if key is None:
        return export_graph(model, inputs, training=training, varying_dims=varying_dims)
    if key not in TRACES:
        if len(TRACES) == MAX_TRACES:
            del TRACES[next(iter(TRACES))]
        TRACES[key] = export_graph(model, inputs, training=training, varying_dims=varying_dims)
    return copy_trace(TRACES[key])


def describe(model, inputs, *, training):
    """All that a forward may depend on: classes, attributes, tensors, inputs and torch's modes."""
    first_names: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    described = [(name, first_names.setdefault(id(tensor), name), of_tensor(tensor)) for name, tensor in tensors]
    with training_mode(model, training=training):
        modules = [(path, type(module), of_attributes(module)) for path, module in model.named_modules()]
    leaves, structure = tree_flatten(split_call_args(inputs))
    values = [of_tensor(leaf) if isinstance(leaf, Tensor) else of_value(leaf) for leaf in leaves]
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    return repr((described, values, structure, modes)), tuple(modules)


def of_tensor(tensor):
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def of_attributes(module):
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        raise UnknownValueError
    own = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    of_class = {name: value for name, value in vars(type(module)).items() if isinstance(value, PLAIN)}
    plain = {name: value for name, value in own.items() if not isinstance(value, nn.Module)}
    return module.training, of_value(plain), of_value(of_class)


def of_value(value):
    if value is None or isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, dict):
        return type(value), tuple((of_value(key), of_value(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(of_value, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(of_value, value))
    if hasattr(value, "to_dict"):  # a configuration of transformers
        return type(value), repr(value.to_dict()), getattr(value, "_attn_implementation", None)
    raise UnknownValueError


def copy_trace(traced):
    """A trace whose graph may be changed."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(traced.graph, nodes))
    graph.output_node().meta = dict(traced.graph.output_node().meta)
    graph.set_codegen(traced.graph._codegen)
    return replace(
        traced,
        graph=graph,
        constants=dict(traced.constants),
        params={nodes[node]: name for node, name in traced.params.items()},
        buffers={nodes[node]: name for node, name in traced.buffers.items()},
        inputs=tuple(nodes[node] for node in traced.inputs),
        sizes={nodes[node]: expression for node, expression in traced.sizes.items()},
    )
