"""The terms of a plan's text, ``name(ranks, option=value)``, and the strategies that they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from counterpoint.errors import PlanError
from counterpoint.plan.registry import STRATEGIES, find_strategy
from counterpoint.strategies.options import MicrobatchCount, option_types, parse_option
from counterpoint.strategies.strategy import Strategy
from counterpoint.world.mesh import replicas_per_host

MICROBATCH_OPTIONS = ("chunks", "n_push")
"""The options that say how many microbatches the plan has."""
_TERM = re.compile(r"\s*(?P<name>\w+)\s*(?:\((?P<inside>[^()]*(?:\([^()]*\)[^()]*)*)\))?\s*$")


def explicit_microbatches(text: str) -> int | None:
    """Return how many microbatches the text of a plan says with ``chunks=``, or None where it leaves that open.

    Raises:
        PlanError: two of its strategies say different numbers, or one says none.
    """
    found = re.findall(rf"\b({'|'.join(MICROBATCH_OPTIONS)})\s*=([^,()*]*)", text)
    said = sorted({parse_option(name, count.strip(), MicrobatchCount, text): name for name, count in found}.items())
    if len(said) > 1:
        (one, its), (other, name) = said[:2]
        raise PlanError(f"{text!r} says {its}={one} and {name}={other}; a plan has one number of microbatches")
    return said[0][0] if said else None


def resolve_microbatches(text: str, given: int | None) -> int:
    """Return how many microbatches the text of a plan says, or else how many are given, or 1.

    Raises:
        PlanError: both are there and differ.
    """
    said = explicit_microbatches(text)
    if said is not None and given not in {None, said}:
        raise PlanError(f"{text!r} says chunks={said}, but num_microbatches={given}; give one of the two")
    return next((count for count in (said, given) if count is not None), 1)


def published_optimizers(text: str) -> dict[str, str]:
    """Return the optimizers that the systems named in the text of a plan are published with, by system.

    Example:
        >>> published_optimizers("data(2) * downpour(4)")
        {'downpour': 'Adagrad'}
    """
    named = {name: STRATEGIES[name].optimizer for name in re.findall(r"\w+", text) if name in STRATEGIES}
    return {name: wanted for name, wanted in named.items() if wanted}


def parse_term(term: str, start: int, text: str) -> tuple[str, str | None]:
    """Return the name of a strategy and what stands in its brackets, or None where it has none.

    Args:
        term: one of those joined by ``*``.
        start: its place in the text.
        text: the whole plan, for errors.

    Raises:
        PlanError: it is no term, or there is no strategy of that name.
    """
    found = _TERM.match(term)
    if found is None:
        caret = " " * (start + len(term) - len(term.lstrip())) + "^"
        raise PlanError(
            f"{term.strip()!r} is not a strategy; write name(ranks, option=value), joined by *\n  {text}\n  {caret}"
        )
    if found["name"] != "solo":
        find_strategy(found["name"])
    elif found["inside"] is not None:
        raise PlanError(f"solo is one rank and takes no numbers; write solo, not {term.strip()}")
    return found["name"], found["inside"]


def build_strategies(terms: Sequence[tuple[str, str]], text: str, hosts: Sequence[int]) -> tuple[Strategy, ...]:
    """Return the strategies of all terms in a row; what depends on hosts sees the ranks that its axis goes over.

    Raises:
        PlanError: a number or an option of a term is missing, unknown or of the wrong kind.
    """
    strategies: tuple[Strategy, ...] = ()
    stride = 1
    for name, inside in terms:
        made = _build_term(name, inside, text, partial(_ranks_per_host, stride=stride, hosts=hosts))
        strategies += made
        for strategy in made:
            stride = strategy.num_ranks(stride)
    return strategies


def _ranks_per_host(degree: int, stride: int, hosts: Sequence[int]) -> int:
    return replicas_per_host(degree, stride, hosts) if hosts else 0


def _build_term(name: str, arguments: str, text: str, ranks_per_host: Callable[[int], int]) -> tuple[Strategy, ...]:
    named = find_strategy(name)
    parts = [part.strip() for part in re.split(r",(?![^()]*\))", arguments) if part.strip()]
    if not parts or not re.fullmatch(r"\d+", parts[0]) or int(parts[0]) < 1:
        raise PlanError(f"{name} in {text!r} needs the number of ranks along its axis first: {name}(2)")
    options: dict[str, Any] = {}
    kinds = option_types(named.doc_source)
    for part in parts[1:]:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in named.unsupported:
            raise PlanError(f"{name} takes no {key}=: {named.unsupported[key]}")
        if not equals or key not in named.options:
            known = ", ".join(f"{option}=" for option in named.options) or "none"
            raise PlanError(f"{name} has no option {part!r}; its options are {known}")
        if key in options:
            raise PlanError(f"{name} in {text!r} has {key}= twice; give it once")
        options[key] = parse_option(key, value, kinds.get(key, str), text)
    degree = int(parts[0])
    if "per_host" in named.options:
        options.setdefault("per_host", ranks_per_host(degree))
    return named.build_strategies(degree, options)
