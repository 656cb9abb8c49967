"""Compile the functions that ranks run with ``torch.compile``, equal ones once.

Each is one graph for inputs of one signature, or an error that names the line that cannot be traced. Sizes are numbers
in a graph: an uneven last batch has a graph of its own.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import FrameSummary
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from counterpoint.errors import PlanError
from counterpoint.model.compilation import Compilation
from counterpoint.model.precision import DTYPES
from counterpoint.partitioning.unused_outputs import EagerGradients

SegmentFunction: TypeAlias = Callable[..., Any]
_PACKAGE = Path(__file__).parent.parent
_LIBRARIES = tuple(map(str, (Path(torch.__file__).parent, _PACKAGE / "partitioning", _PACKAGE / "runtime")))
"""Folders whose code is not the model's."""
_PYTHON = sysconfig.get_paths()["stdlib"]
"""The folder of Python's own modules, which may contain those of others."""


class SegmentCompiler:
    """Compiles the functions of one model.

    Args:
        compilation: how.
        model_name: of the model's class, for errors.
    """

    def __init__(self, compilation: Compilation, model_name: str) -> None:
        self.compilation, self.model_name = compilation, model_name
        self._compiled: dict[str, SegmentFunction] = {}

    def compile(self, function: SegmentFunction, key: str) -> SegmentFunction:
        """Return the function compiled.

        Args:
            function: what it does depends on its arguments only.
            key: functions with the same key do the same, so that the first one is used for all of them.

        Raises:
            PlanError: torch does not know the backend or its mode.
        """
        if key not in self._compiled:
            self._compiled[key] = self._compile(function)
        return self._compiled[key]

    def _compile(self, function: SegmentFunction) -> SegmentFunction:
        how = self.compilation
        try:
            backend = EagerGradients(how.backend, how.mode, is_chained=how.parts == "blocks")
            backend.find_compiler()  # before the first step
            compiled = torch.compile(with_own_code(function), backend=backend, fullgraph=True, dynamic=False)
        except Exception as error:
            raise PlanError(f"torch.compile does not take compile={how}: {first_line(error)}") from error
        return partial(self._call, compiled)

    def _call(self, compiled: SegmentFunction, *args: Any) -> Any:  # noqa: ANN401 - as the function
        """Call a compiled function; say where it cannot be compiled."""
        try:
            return compiled(*args)
        except Exception as error:
            from torch._dynamo import config, exc  # two seconds, if nothing is compiled
            from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # likewise

            if isinstance(error, exc.FailOnRecompileLimitHit):
                raise PlanError(
                    f"compile={self.compilation} has compiled a part of {self.model_name} for {config.recompile_limit} "
                    "kinds of inputs, which is torch's limit; give batches of few shapes (pad lengths to multiples of "
                    "64), raise torch._dynamo.config.recompile_limit, or drop compile="
                ) from error
            if any(text in str(error) for text in LSTM_FAILURES):
                raise PlanError(
                    f"compile={self.compilation} cannot compile {self.model_name}, because torch has no compiled "
                    "nn.LSTM in float32, bf16 and fp16 on a CPU; give backend=eager, use nn.GRU, or drop compile="
                ) from error
            if not isinstance(error, exc.TorchDynamoException | GuardOnDataDependentSymNode):
                raise
            opaque = next(find_opaque_tensors(args), None)
            if opaque is not None:
                raise PlanError(
                    f"compile={self.compilation} cannot compile {self.model_name}, whose inputs or weights are tensors "
                    f"of {type(opaque).__name__}, into which torch.compile cannot look because the class has no "
                    "__tensor_flatten__; drop compile="
                ) from error
            if RECURRENT in str(error) and not config.allow_rnn:
                with config.patch(allow_rnn=True):
                    return self._call(compiled, *args)
            if config.skip_fwd_side_effects_in_bwd_under_checkpoint or SIDE_EFFECT not in str(error):
                raise PlanError(self.describe_effect(error, args) or self.describe_break(error)) from error
            with config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
                return self._call(compiled, *args)

    def describe_effect(self, error: Exception, args: Sequence[Any]) -> str:
        """Return why a checkpoint of a recurrent layer with cast weights cannot be one graph; else an empty text."""
        found = [find_cast_recurrent(value) for value in tree_leaves(args) if isinstance(value, nn.Module)]
        path, dtype = next(filter(None, found), ("", None))
        if dtype is None or CAST_EFFECT not in str(error):
            return ""
        compute = next(name for name, one in DTYPES.items() if getattr(torch, one) is dtype)
        blocks = replace(self.compilation, parts="blocks")
        return (
            f"compile={self.compilation} cannot compile {self.model_name} with precision='{compute}', whose recurrent "
            f"layer '{path}' is called by torch.utils.checkpoint: the casts of its weights are put into its list of "
            "weights, which torch.compile does not trace inside of a checkpoint; give "
            f"precision='{compute}(autocast=true)' or compile='{blocks}', call the layer outside of the checkpoint, or "
            "drop compile="
        )

    def describe_break(self, error: Exception) -> str:
        """Return why a function is not one graph, and the line of the model because of which it is not."""
        frame = find_user_frame(getattr(error, "real_stack", None) or ())
        place = "" if frame is None else f", at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        logged = LOGGER_CALL.search(str(error))
        without_message = (
            "leave the message out of graphs by "
            f"torch._dynamo.config.ignore_logger_methods.add(logging.Logger.{logged[1]}), "
            if logged
            else ""
        )
        failed = OPERATION_FAILURE.search(str(error))
        if failed:
            return (
                f"compile={self.compilation} cannot compile {self.model_name}, as an operation fails{place}: "
                f"{failed[1]}; give inputs of shapes and dtypes that this line takes, or drop compile= if it runs "
                "without"
            )
        return (
            f"compile={self.compilation} cannot compile {self.model_name} as one graph: {first_line(error)}{place}; "
            f"change this line so that torch.compile can trace it, {without_message}or drop compile="
        )


OPERATION_FAILURE = re.compile(r"with fake tensors: .*: got (\w+\(.*\))$", re.MULTILINE)
"""Torch's text where an operation of a forward fails on the shapes of its inputs while it is traced."""

LSTM_FAILURES = ("mkldnn_rnn_layer", "expected all tensors_saved_with_vc_check to be Tensors")
"""Texts of inductor and of AOTAutograd where the backward of an LSTM of oneDNN would be in a graph."""

LOGGER_CALL = re.compile(r"context: method: <.*>\.(\w+), args")
"""How torch names the method of a logger that a graph would call."""

RECURRENT = "Attempted to wrap RNN, GRU, or LSTM"
"""Torch's text where a graph would have a recurrent layer, which it allows on request only, as tracing takes long."""

SIDE_EFFECT = "HOP: Non-nullified side effect"
"""Torch's text where draws are counted inside of ``torch.utils.checkpoint``, which it allows on request only."""


def find_cast_recurrent(model: nn.Module) -> tuple[str, torch.dtype] | None:
    """Return the path of a recurrent layer whose weights are cast in hooks, and the dtype of the casts; None for none.

    Only a ``CastParameters`` has a dtype, whose module cannot be imported here.
    """
    for path, module in model.named_modules():
        dtype = getattr(vars(module)["_parameters"], "dtype", None)
        if isinstance(module, nn.RNNBase) and dtype is not None:
            return path, dtype
    return None


CAST_EFFECT = "Attempted to mutate DunderDictVariable"
"""Torch's text where the list of weights of a recurrent layer is replaced inside of ``torch.utils.checkpoint``."""


def find_opaque_tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in modules there, of classes that no graph can have as inputs."""
    for value in tree_leaves(args):
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]
        for tensor in tensors:
            is_own = isinstance(tensor, Tensor) and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
            if is_own and not hasattr(tensor, "__tensor_flatten__"):
                yield tensor


def with_own_code(function: SegmentFunction) -> SegmentFunction:
    """Return a copy of a function with another code object: torch.compile counts and stores graphs by code object."""
    if not isinstance(function, FunctionType):
        return function
    code, scope = function.__code__.replace(), function.__globals__
    return FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, and the exception of the traced code that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    context = next((line for line in lines if line.startswith("Developer debug context: raised exception")), "")
    return " ".join(filter(None, [lines[0] if lines else type(error).__name__, context.partition("context: ")[2]]))


def find_user_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame that is not of torch, Python or this package, or the innermost one."""
    for frame in reversed(frames):
        is_python = frame.filename.startswith(_PYTHON) and "site-packages" not in frame.filename
        if not is_python and not frame.filename.startswith(_LIBRARIES):
            return frame
    return frames[-1] if frames else None


def call_module(mode: TorchFunctionMode, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any result
    """Call a module under a function mode, which becomes part of a graph."""
    with mode:
        return module(*args, **kwargs)


def call_in_order(mode: TorchFunctionMode, modules: Sequence[nn.Module], value: Any) -> Any:  # noqa: ANN401 - as above
    """Call modules one after the other, likewise."""
    with mode:
        for module in modules:
            value = module(value)
        return value


def with_mode(function: SegmentFunction) -> SegmentFunction:
    """Return a function that is called under a function mode, likewise; the mode is its first argument."""

    def call(mode: TorchFunctionMode, *args: Any) -> Any:  # noqa: ANN401 - as the function
        with mode:
            return function(*args)

    return call
