"""What ranks are given, described as texts that are compared before the first step.

Every rank describes the call, its process, model, plan, optimizer, options, loss and data; one exchange shows the first
difference, with the ranks and the values. A text is the same in every process for an equal value; values of unknown
types are described by their type alone.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from hashlib import sha256
from inspect import unwrap
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias, cast

import torch
from torch import nn, optim

from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.fabric import Fabric
from counterpoint.fabric.fingerprint import dtype_name, format_ranks
from counterpoint.model.compilation import Compilation, parse_compilation
from counterpoint.model.precision import Precision, parse_precision
from counterpoint.optim.validation import shorten
from counterpoint.partitioning.dry_run import require_initialized
from counterpoint.partitioning.partitioned_model import find_embedding_tables
from counterpoint.runtime.loss.loss_reduction import LossFunction
from counterpoint.runtime.loss.loss_scale import parse_loss_scale
from counterpoint.terminal_text import escape_surrogates
from counterpoint.training.agreement.values_of_code import (
    WatchedValue,
    class_values_of,
    code_run_by,
    is_plain,
    names_in_own,
    values_read_by_own,
)
from counterpoint.training.options import TrainingOptions

NamedFacts: TypeAlias = Sequence[Sequence[str]]
"""Pairs of a name and a description, in order."""

SAME_DATA = "every rank passes the whole data and reads its own samples of them: remove the sharding"
SAME_BATCH = "every rank passes the same global batch and takes its own part of it"
SAME_ENVIRONMENT = "start all ranks with the same settings and versions"
REMEDIES = {
    "the data": SAME_DATA,
    "the dataset": SAME_DATA,
    "the content of samples": SAME_DATA,
    "the held-out data": SAME_DATA,
    "the first batch": f"{SAME_DATA}, and draw nothing that differs",
    "the size of the batch": f"{SAME_BATCH}: remove the sharding of batches, or pass batches='per_rank' to parallelize",
    "the form of the batch": f"{SAME_BATCH}: collate batches alike on all ranks",
    "the content of the batch": f"{SAME_BATCH}: remove a DistributedSampler, shuffle with the same seed on every rank, "
    "and draw no noise that differs; or pass batches='per_rank' to parallelize",
    "the order of samples": "give samplers, and their generators, the same seed on all of them",
    "the model": "call model.train(), or model.eval(), on all of them",
    "the loss": "give the same function, with the same code and the same settings, on all of them, or, if results do "
    "not depend on a setting, the name verbose, debug, logger, is_main or rank, which is not compared",
    "the plan": "give the same strategy and num_microbatches on all of them",
    "the call": "every rank runs the same script: make the same calls in the same order on all of them",
}
SAME_OPTION = "give the same value on all of them"
SAME_VALUE = (
    f"{SAME_OPTION}, or, if results do not depend on it, a name with rank, device or host, or with a word such as "
    "main, verbose, log, time, port, path or file, which is not compared"
)
MAX_OPTION = 200
"""Longer texts of options are compared by a digest."""
MAX_COMPARED = 10_000
"""The largest number of elements of a tensor or a container that is compared."""
MAX_DEPTH = 3
"""How deep values in values are compared."""
BUILD_IDENTICALLY = "every rank must build the same one: look for a setting, a file or a random choice that differs"
SORT_HINT = "parameters are in the order of their creation: sort the results of a set, os.listdir or glob before a loop"
PER_RANK_NAMES = re.compile("rank|device")
"""Attributes with these names may differ between ranks."""
PER_RANK_VALUES = re.compile(
    "rank|device|gpu|procid|localid|local_?(world_?)?size|host|node|(?<![a-z])(is_?)?("
    "main|master|leader|chief|primary|verbos(e|ity)|quiet|debug|log(s|ger|ging)?|(log|tmp|out|work|data|root)(dir|file|path)|"
    "writer|progress|p?bar|time|timestamp|start(ed)?|now|clock|p?pid|process|proc|ports?|(file)?paths?|dirs?|director(y|ies)|"
    "dirname|folders?|files?|filename|tmp|tmpdir|tempdir|run_?id|run_?name|job_?id|uuid|home|cwd|pwd|user(name)?|"
    "addr|address|ip)(?![a-z])",
    re.IGNORECASE,
)
"""Values that code reads by these names, or by names with these words, may differ between ranks."""
GIVEN_FLAGS = re.compile(
    "_*(is_?|should_?)?((local|global|world)_?)?(main|master|leader|chief|primary|verbos(e|ity)|quiet|debug|log|logs|"
    "logging|logger|writer|progress|p?bar|rank|device)(_?(process|proc|rank))?",
)
"""Variables of closures, defaults and keywords with these names may differ between ranks, as flags and loggers."""
SECRET_NAMES = re.compile("key|token|secret|pass|pwd|auth|cred|private|cookie|salt|dsn|url|user", re.IGNORECASE)
"""Values with these names are compared, but not shown."""
VALUES_READ = ("the environment variable ", "the global ", "the variable ", "the class attribute ")
"""Beginnings of the names of values that code reads."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What a call was given on this rank, in addition to what the ranks were made with.

    Args:
        arguments: the call and its arguments.
        data: what identifies its data.
    """

    arguments: NamedFacts = ()
    data: NamedFacts = ()

    def require_same(self, fabric: Fabric, own: Sequence[NamedFacts] = ()) -> None:
        """Check that all ranks were given the same; a collective call.

        Args:
            fabric: this rank's fabric.
            own: what this rank was made with.

        Raises:
            PlanError: arguments, or what ranks were made with, differ; all ranks raise the same first difference.
            DataError: the data differ.
        """
        facts = [list(self.arguments), *own, list(self.data)]
        gathered = fabric.gather_values("what ranks are given", facts, tuple(range(fabric.num_ranks)))
        differences = list(map(first_difference, zip(*cast("list[list[NamedFacts]]", gathered), strict=True)))
        if differences[0]:
            raise PlanError(f"the ranks do not make the same call: {differences[0]}")
        if any(differences[1:-1]):
            raise PlanError(f"the ranks do not train the same model: {next(filter(None, differences[1:-1]))}")
        if differences[-1]:
            raise DataError(f"the ranks were given different data: {differences[-1]}")


def describe_ranks(
    model: nn.Module, plan: NamedFacts, optimizer: optim.Optimizer, loss: LossFunction, options: TrainingOptions
) -> list[NamedFacts]:
    """Return what ranks are made with, in the order in which it is compared.

    Args:
        model: this rank's model.
        plan: what was asked for.
        optimizer: this rank's optimizer; every rank updates its part of one model by its options.
        loss: this rank's loss function; its name and its code are compared.
        options: this rank's options.

    Raises:
        PlanError: a parameter has no values yet.
    """
    require_initialized(model)
    return [
        describe_process(),
        plan,
        *describe_structure(model),
        [["the model", describe_mode(model)]],
        describe_optimizer(optimizer, {id(param): name for name, param in model.named_parameters()}),
        describe_options(options),
        [["the loss", describe_function(loss)]],
        describe_values_read(model, loss),
    ]


def describe_arguments(values: Mapping[str, object]) -> list[list[str]]:
    """Return the arguments of a call by name."""
    return [[f"the argument {name}", describe_value(value)] for name, value in values.items()]


def describe_process() -> list[list[str]]:
    """Return the settings of this process that change results."""
    autocasts = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [
        ["the version of Python", platform.python_version().rpartition(".")[0]],
        ["torch's default dtype", dtype_name(torch.get_default_dtype())],
        ["torch.are_deterministic_algorithms_enabled()", str(torch.are_deterministic_algorithms_enabled())],
        ["torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision()],
        ["the autocast of the call", ", ".join(autocasts) or "none"],
    ]


def describe_structure(model: nn.Module) -> list[list[list[str]]]:
    """Return facts that must be equal on all ranks: parameters, buffers, and modules with their settings, in order."""
    tables = find_embedding_tables(model)
    params = [
        [
            name,
            f"{dtype_name(param.dtype)} {tuple(param.shape)} on {param.device.type}"
            f"{'' if param.requires_grad else ', frozen'}{', with sparse gradients' if tables.get(name) else ''}",
        ]
        for name, param in model.named_parameters()
    ]
    buffers = [
        [name, f"{dtype_name(buffer.dtype)} {tuple(buffer.shape)} on {buffer.device.type}, a buffer"]
        for name, buffer in model.named_buffers()
    ]
    modules = [[f"module {path}".rstrip(), describe_module(module)] for path, module in model.named_modules()]
    return [params, buffers, modules]


def describe_module(module: nn.Module) -> str:
    """Return the type of a module, its plain attributes, and a digest of its code unless it is torch's own."""
    name, is_of_torch = type(module).__name__, type(module).__module__.startswith("torch.nn.")
    if is_of_torch and any(True for _ in module.children()):
        return name
    settings = ", ".join(f"{key}={describe_value(value, 1)}" for key, value in plain_attributes(module))
    if is_of_torch:
        return f"{name}({module.extra_repr() or settings})"
    text = f"{name}({settings})" if len(settings) < MAX_OPTION else f"{name}, settings {digest(settings)}"
    return f"{text}, code {describe_class(type(module))}"


def plain_attributes(value: object) -> Iterator[tuple[str, object]]:
    """Yield the public attributes of an object, but for those that may differ between ranks."""
    for key, attribute in sorted(getattr(value, "__dict__", {}).items()):
        if not key.startswith("_") and key != "training" and not PER_RANK_NAMES.search(key):
            yield key, attribute


def describe_values_read(model: nn.Module, loss: LossFunction) -> list[list[str]]:
    """Return by name numbers, texts and collections that the forward of a model and its loss read from outside.

    Left out are private names and those of what may differ between ranks, and values that are None: a writer of logs is
    often None on all ranks but one.
    """
    functions = [*code_run_by(model), *code_run_by(loss)]
    names = names_in_own(functions)
    class_values = [
        replace(value, name=f"the class attribute {value.name}")
        for value in class_values_of(model)
        if value.key in names
    ]
    by_name: dict[str, list[WatchedValue]] = {}
    for value in [*class_values, *values_read_by_own(functions)]:
        by_name.setdefault(value.name, []).append(value)
    facts = []
    for name, values in sorted(by_name.items()):
        for number, value in enumerate(values, 1):  # several of classes or functions that one function has made
            text = describe_value_read(value.path or str(value.key), value.value)
            facts += [[name if len(values) == 1 else f"{name} ({number} of {len(values)})", text]] if text else []
    return facts


def describe_value_read(path: str, value: object) -> str:
    """Return a value that code reads as text, a secret as a digest; empty if it may differ between ranks.

    Args:
        path: by which code reads it.
        value: what it reads.

    Example:
        >>> describe_value_read("config.scale", 2.0), describe_value_read("config.rank", 1)
        ('2.0', '')
    """
    if value is None or path.startswith("_") or may_differ(path):
        return ""
    text = describe_value(without_per_rank(value))
    is_secret = SECRET_NAMES.search(path) or (isinstance(value, dict | list | tuple) and SECRET_NAMES.search(text))
    return text if len(text) < MAX_OPTION and not is_secret else f"digest {digest(text)}"


def may_differ(path: str) -> bool:
    """Tell whether a value that code reads by a path may differ between ranks, as its name says.

    Example:
        >>> may_differ("isMain"), may_differ("start_time"), may_differ("logit_scale")
        (True, True, False)
    """
    return bool(PER_RANK_VALUES.search(re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", path)))


def without_per_rank(value: object, depth: int = 0) -> object:
    """Return a collection without entries of dicts that may differ between ranks."""
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, dict):
        kept = [(key, item) for key, item in value.items() if not may_differ(str(key))]
        return {key: without_per_rank(item, depth + 1) for key, item in kept}
    return [without_per_rank(item, depth + 1) for item in value] if isinstance(value, list | tuple) else value


def describe_optimizer(optimizer: optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the type of an optimizer, and the parameters and the options of its groups.

    Args:
        optimizer: what is described.
        names: the names of the model's parameters, by ``id``.
    """
    kind = type(optimizer)
    code = "" if kind.__module__.startswith("torch.optim") else f", code {describe_class(kind)}"
    facts = [["the optimizer", kind.__name__ + code]]
    for index, group in enumerate(optimizer.param_groups):
        params = sorted(names.get(id(param), "a tensor that is not of the model") for param in group["params"])
        listed = ", ".join(params)
        text = listed if len(listed) < MAX_OPTION else f"{shorten(listed)}, digest {digest(listed)}"
        facts.append([f"the list of parameters in the optimizer's group {index}", text])
        facts += [[f"{key} of the optimizer's group {index}", text] for key, text in describe_group(group).items()]
    return facts


def describe_group(group: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of a parameter group as texts, by name."""
    return {key: describe_value(value) for key, value in group.items() if key not in {"params", "param_names"}}


def describe_options(options: TrainingOptions) -> list[list[str]]:
    """Return all training options by name, long ones as a digest; two ways to write the same value are one text.

    The profile is part of the plan, and the kind of device is compared with the model.
    """
    parsed = {
        "precision": parse_precision(options.precision),
        "compile": parse_compilation(options.compile),
        "loss_scale": parse_loss_scale(options.loss_scale),
        "offload_folder": options.offload_folder is not None,  # each host may have a disk of its own
    }
    values = {
        option.name: describe_option(parsed.get(option.name, getattr(options, option.name)), str(option.type))
        for option in sorted(fields(options), key=lambda one: one.name != "precision")  # which may imply loss_scale
        if option.name not in {"device", "profile", "init_weights"}
    }
    if options.init_weights is not None:
        values["init_weights"] = describe_function(options.init_weights)
    return [
        [f"the option {name}", value if len(value) < MAX_OPTION else digest(value)] for name, value in values.items()
    ]


def describe_option(value: object, annotation: str) -> str:
    """Return an option as text: precision and compile as plans have them, and an int as a float where it is one."""
    if type(value) is int and "float" in annotation:
        value = float(value)
    return str(value) if isinstance(value, Precision | Compilation) else repr(value)


def describe_function(function: object, depth: int = 0) -> str:
    """Return the name of a function or module, what it was made with, and a digest of its code.

    Example:
        >>> describe_function(lambda output, targets: 1) == describe_function(lambda output, targets: 2)
        False
    """
    if isinstance(function, partial):
        keywords = [(name, value) for name, value in sorted(function.keywords.items()) if not _is_flag(name, value)]
        given = [describe_value(value, depth) for value in (*function.args, *keywords)]
        return f"partial of {describe_function(function.func, depth)} with {shorten(', '.join(given))}"
    if isinstance(function, MethodType):
        return f"{describe_function(function.__func__, depth)} of {describe_object(function.__self__, depth)}"
    if isinstance(function, nn.Module):
        name = f"{type(function).__name__}({function.extra_repr()})"
        if depth:
            return name
        parts = [[path, describe_module(module)] for path, module in function.named_modules()]
        state = [[key, describe_value(value)] for key, value in function.state_dict().items()]
        return f"{name}, code {digest(repr((parts, state)))}"
    unwrapped: object = unwrap(function) if callable(function) else function
    if isinstance(unwrapped, FunctionType):
        given = [describe_value(value, depth + 1) for value in _values_given_to(unwrapped)]
        code = describe_code(unwrapped.__code__), given, list(describe_globals(unwrapped, depth + 1))
        return f"{unwrapped.__qualname__}, code {digest(repr(code))}"
    if hasattr(function, "__name__"):
        return str(function.__name__)
    return describe_object(function, depth)


def _values_given_to(function: FunctionType) -> Iterator[object]:
    """Yield the variables of a function's closure and its defaults, without those that may differ between ranks."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable that is not assigned yet
            value = cell.cell_contents
            if not _is_flag(name, value):
                yield value
    params = code.co_varnames[: code.co_argcount]
    named = [
        *zip(params[len(params) - len(defaults) :], defaults, strict=True),
        *(function.__kwdefaults__ or {}).items(),
    ]
    for name, value in named:
        if not _is_flag(name, value):
            yield (name, value)


def _is_flag(name: str, value: object) -> bool:
    """Tell whether what a function is given may differ between ranks: a flag, a logger or a rank by its name."""
    if not GIVEN_FLAGS.fullmatch(name) or callable(value):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        return "rank" in name
    return not isinstance(value, float | complex | torch.Tensor | list | tuple | set | frozenset | dict)


def describe_globals(function: FunctionType, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the global values that the code of a function reads, but for modules and what libraries define."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if may_differ(name) and is_plain(value):
            continue
        if isinstance(value, bool | int | float | str | tuple | list | dict | torch.Tensor) or (
            isinstance(value, FunctionType) and value.__module__ == function.__module__ and depth < MAX_DEPTH
        ):
            yield name, describe_value(value, depth)


def describe_object(value: object, depth: int) -> str:
    """Return the type of an object with its public attributes and its code, if it is not too deep in others."""
    name = type(value).__qualname__
    if depth >= MAX_DEPTH or isinstance(value, nn.Module):
        return name
    attributes = [[key, describe_value(attribute, depth + 1)] for key, attribute in plain_attributes(value)]
    return f"{name}, code {describe_class(type(value))}, settings {digest(repr(attributes))}"


def describe_value(value: object, depth: int = 0) -> str:  # noqa: PLR0911 - one for each kind
    """Return a text that is the same in every process for an equal value; for unknown types only the type."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, PurePath):
        return repr(str(value))
    if isinstance(value, torch.Tensor):
        described = f"{dtype_name(value.dtype)} {tuple(value.shape)}"
        return described + (f" {digest(repr(value.tolist()))}" if value.numel() <= MAX_COMPARED else "")
    if depth > MAX_DEPTH:
        return type(value).__qualname__
    if isinstance(value, list | tuple | set | frozenset | dict):
        if len(value) > MAX_COMPARED:
            return f"{type(value).__qualname__} of {len(value)}"
        if isinstance(value, dict):
            pairs = [f"{describe_value(key, depth)}: {describe_value(item, depth + 1)}" for key, item in value.items()]
            return f"{{{', '.join(sorted(pairs))}}}"
        items = [describe_value(item, depth + 1) for item in value]
        return f"({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
    if isinstance(value, optim.lr_scheduler.LRScheduler):
        return describe_object(value, depth)
    if callable(value) and not isinstance(value, type) and not isinstance(value, optim.Optimizer):
        return describe_function(value, depth)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def describe_class(cls: type) -> str:
    """Return a digest of the code of a class and of its bases that are not torch's."""
    return _digest_class(cast("Hashable", cls))


@cache
def _digest_class(cls: Any) -> str:  # noqa: ANN401 - a class
    code = [
        (name, describe_code(function.__code__))
        for base in cls.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for name, member in vars(base).items()
        for function in [_function_of(member)]
        if function is not None
    ]
    return digest(repr(code))


def _function_of(member: object) -> FunctionType | None:
    """Return the function of a member of a class, if it is a method, a property or the like."""
    member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    unwrapped: object = unwrap(member) if callable(member) else member
    return unwrapped if isinstance(unwrapped, FunctionType) else None


def describe_code(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object does: the same value in every process that has the same source and Python."""
    constants = [
        describe_code(value) if isinstance(value, CodeType) else sorted(map(repr, value))
        if isinstance(value, frozenset) else repr(value)
        for value in code.co_consts
    ]  # fmt: skip
    return code.co_code.hex(), code.co_names, constants


def digest(text: str) -> str:
    """Return a short digest of a text."""
    return sha256(escape_surrogates(text).encode()).hexdigest()[:12]


def describe_mode(model: nn.Module) -> str:
    """Return the mode of the model, and the submodules that are in evaluation mode in a training model."""
    if not model.training:
        return "in evaluation mode"
    eval_modules = ", ".join(path for path, module in model.named_modules() if not module.training)
    return "in training mode" + (f" but for {eval_modules}" if eval_modules else "")


def first_difference(
    facts_by_rank: Sequence[NamedFacts], ranks: Sequence[int] = (), remedy: str = BUILD_IDENTICALLY
) -> str:
    """Return the first difference between ranks, with the ranks and the remedy; empty if there is none.

    Args:
        facts_by_rank: the facts of every rank.
        ranks: their numbers; by default from 0.
        remedy: for facts without one of their own.

    Example:
        >>> first_difference([[["a", "float32"]], [["a", "float16"]], [["a", "float32"]]])
        'a is float32 on ranks 0, 2, float16 on rank 1; every rank must build the same one: look for a setting, ...'
    """
    ranks = ranks or range(len(facts_by_rank))
    names = [name for rank_facts in facts_by_rank for name, _ in rank_facts]
    if names and all(name.startswith(VALUES_READ) for name in names):
        return _first_difference_by_name(facts_by_rank, ranks)
    return _first_difference_by_index(facts_by_rank, ranks, remedy)


def _first_difference_by_name(facts_by_rank: Sequence[NamedFacts], ranks: Sequence[int]) -> str:
    """Return the first value that code reads that differs between ranks that have one by its name."""
    values: dict[str, list[tuple[int, Sequence[str]]]] = {}
    for rank, facts in zip(ranks, facts_by_rank, strict=True):
        for fact in facts:
            values.setdefault(fact[0], []).append((rank, fact))
    for _, having in sorted(values.items()):
        if difference := _first_difference_by_index([[fact] for _, fact in having], [rank for rank, _ in having], ""):
            return difference
    return ""


def _first_difference_by_index(facts_by_rank: Sequence[NamedFacts], ranks: Sequence[int], remedy: str) -> str:
    """Return the first fact that differs in what ranks have in the same order."""
    for index in range(max(map(len, facts_by_rank))):
        facts = [tuple(rank_facts[index]) if index < len(rank_facts) else ("", "") for rank_facts in facts_by_rank]
        if len(set(facts)) == 1:
            continue
        names = {name for name, _ in facts}
        if len(names) == 1:
            name = names.pop()
            groups = group_ranks_by_fact(facts, ranks, lambda fact, rank_text: f"{fact[1]} on {rank_text}")
            return f"{name} is {groups}; {find_remedy(name) or remedy}"
        groups = group_ranks_by_fact(
            facts,
            ranks,
            lambda fact, rank_text: f"{rank_text} {'have' if ',' in rank_text else 'has'} {fact[0] or 'no more'}",
        )
        if len({tuple(sorted(map(tuple, rank_facts))) for rank_facts in facts_by_rank}) == 1:
            return f"they have the same parameters in another order: at index {index} {groups}; {SORT_HINT}"
        return f"at index {index} {groups}; {remedy}"
    return ""


def find_remedy(name: str) -> str:
    """Return what to do about a fact that differs; empty if there is nothing special."""
    if name in REMEDIES:
        return REMEDIES[name]
    if name.startswith(("torch", "the version of ", "the autocast ")):
        return SAME_ENVIRONMENT
    if name.startswith(VALUES_READ):
        return SAME_VALUE
    return SAME_OPTION if name.startswith(("the option ", "the argument ")) else ""


def group_ranks_by_fact(
    facts: Sequence[tuple[str, ...]], ranks: Sequence[int], format_group: Callable[[tuple[str, ...], str], str]
) -> str:
    """Format each distinct fact with the ranks that have it, in order of their lowest rank."""
    pairs = list(zip(ranks, facts, strict=True))
    return ", ".join(
        format_group(fact, format_ranks([rank for rank, rank_fact in pairs if rank_fact == fact]))
        for fact in dict.fromkeys(facts)
    )
