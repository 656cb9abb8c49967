"""The text of a plan: terms ``name(ranks, option=value)`` joined by ``*``, and the strategies that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from counterpoint.errors import PlanError
from counterpoint.optim.validation import parse_digits, renamed_hint
from counterpoint.plan.registry import STRATEGIES, StrategyEntry, find_strategy
from counterpoint.strategies.options import MicrobatchCount, PlanTextError, option_types, parse_option
from counterpoint.strategies.renamed import RENAMED
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.mesh import replicas_per_host

MICROBATCH_OPTIONS = ("chunks", "n_push")
"""The options that give the plan's number of microbatches."""
MAX_LENGTH = 10_000
"""The longest text of a plan, in characters."""
MAX_DEGREE = 1_000_000
"""The largest number of ranks along one axis; a pipeline keeps a number for each of its stages."""
_DIGITS = re.compile(r"[0-9]+")
_TERM = re.compile(r"\s*(?P<name>\w+)\s*(?:\((?P<arguments>[^()]*(?:\([^()]*\)[^()]*)*)\))?\s*$")


def require_short_text(text: str) -> None:
    """Check the length of the text of a plan; the time to parse it grows with its square.

    Raises:
        PlanError: it is too long.
    """
    if len(text) > MAX_LENGTH:
        raise PlanError(f"the text of a plan has {len(text)} characters; write at most {MAX_LENGTH}")


def explicit_microbatches(text: str) -> int | None:
    """Return the number of microbatches that the text of a plan gives with ``chunks=``, or None.

    Raises:
        PlanError: two of its strategies give different numbers, or a value is not a number.
    """
    matches = re.findall(rf"\b({'|'.join(MICROBATCH_OPTIONS)})\s*=([^,()*]*)", text)
    try:
        counts = {parse_option(name, count.strip(), MicrobatchCount): name for name, count in matches}
    except PlanTextError as error:
        raise error.in_text(text) from None
    if len(counts) > 1:
        (count, name), (other_count, other_name) = sorted(counts.items())[:2]
        raise PlanError(
            f"{text!r} gives {name}={count} and {other_name}={other_count}; a plan has one number of microbatches"
        )
    return next(iter(counts), None)


def resolve_microbatches(text: str, given: int | None) -> int:
    """Return the number of microbatches in the text of a plan, or else the given one, or 1.

    Raises:
        PlanError: both are there and differ.
    """
    explicit = explicit_microbatches(text)
    if explicit is not None and given not in {None, explicit}:
        raise PlanError(f"{text!r} has chunks={explicit}, but num_microbatches={given}; give one of the two")
    return next((count for count in (explicit, given) if count is not None), 1)


def published_optimizers(text: str) -> dict[str, str]:
    """Return the optimizers that the systems named in the text of a plan are published with, by system.

    Example:
        >>> published_optimizers("data(2) * downpour(4)")
        {'downpour': 'Adagrad'}
    """
    optimizers = {name: STRATEGIES[name].optimizer for name in re.findall(r"\w+", text) if name in STRATEGIES}
    return {name: optimizer for name, optimizer in optimizers.items() if optimizer}


def parse_term(term: str, start: int) -> tuple[str, str | None]:
    """Return the name of a strategy and the text in its brackets, or None without brackets.

    Args:
        term: one of those joined by ``*``.
        start: its index in the text.

    Raises:
        PlanError: it is not a term, or there is no strategy of that name.
    """
    match = _TERM.match(term)
    if match is None:
        column = start + len(term) - len(term.lstrip())
        fact = "is not a strategy; write name(ranks, option=value), joined by *"
        raise PlanTextError(repr(term.strip()), fact, column)
    if match["name"] != "solo":
        find_strategy(match["name"])
    elif match["arguments"] is not None:
        raise PlanError(f"solo is one rank and has no arguments; write solo, not {term.strip()}")
    return match["name"], match["arguments"]


def build_strategies(terms: Sequence[tuple[str, str]], hosts: Sequence[int]) -> tuple[Strategy, ...]:
    """Return the strategies of all terms; a default that depends on hosts is computed from the ranks of its axis.

    Raises:
        PlanError: a number or an option of a term is missing, unknown or of the wrong type.
    """
    strategies: tuple[Strategy, ...] = ()
    stride = 1
    for name, arguments in terms:
        built = _build_term(name, arguments, partial(_ranks_per_host, stride=stride, hosts=hosts))
        strategies += built
        for strategy in built:
            stride = strategy.num_ranks(stride)
    return strategies


def _ranks_per_host(degree: int, stride: int, hosts: Sequence[int]) -> int:
    return replicas_per_host(degree, stride, hosts) if hosts else 0


def _build_term(name: str, arguments: str, ranks_per_host: Callable[[int], int]) -> tuple[Strategy, ...]:
    entry = find_strategy(name)
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", arguments) if part.strip()]
    degree = parse_digits(parts[0], f"the number of ranks of {name}") if parts and _DIGITS.fullmatch(parts[0]) else 0
    if degree < 1:
        raise PlanTextError(name, f"needs the number of ranks along its axis first: {name}(2)")
    if degree > MAX_DEGREE:
        raise PlanTextError(name, f"has {degree} ranks along its axis; give at most {MAX_DEGREE}")
    options: dict[str, Any] = {}
    types = option_types(entry.doc_source)
    for part in parts[1:]:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        _check_option(name, entry, part, key if equals else "")
        if key in options:
            raise PlanTextError(name, f"has {key}= twice; give it once")
        options[key] = parse_option(key, value, types.get(key, str))
    if "per_host" in entry.options:
        options.setdefault("per_host", ranks_per_host(degree))
    return entry.build_strategies(degree, options)


def _check_option(name: str, entry: StrategyEntry, part: str, key: str) -> None:
    if key in entry.unsupported:
        raise PlanError(f"{name} has no option {key}=: {entry.unsupported[key]}")
    if key not in entry.options:
        known = ", ".join(f"{option}=" for option in entry.options) or "none"
        hint = (
            renamed_hint(key, RENAMED) if RENAMED.get(key) in {*entry.options, *option_types(entry.doc_source)} else ""
        )
        raise PlanError(f"{name} has no option {part!r}; its options are {known}{hint}")
