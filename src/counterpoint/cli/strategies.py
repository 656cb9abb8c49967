"""``counterpoint strategies``: the catalogue of strategies, from their registry and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import typer

from counterpoint.cli.echo import echo
from counterpoint.cli.show import default_blocks, tick_costs
from counterpoint.cli.tables import TableColumn, print_table
from counterpoint.compiler.compile import compile  # noqa: A004 - read as cp.compile
from counterpoint.model.spec import linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.plan.registry import STRATEGIES, StrategyEntry, find_strategy
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULE_NAMES
from counterpoint.viz.ascii_timeline import abbreviate_program, draw_ascii_timeline

SECTIONS = ("Promise", "Cost", "Source")
_SECTION = re.compile(r"^(\w+):$")


def strategies(
    name: Annotated[str | None, typer.Argument(help="A strategy to describe; if omitted, list all.")] = None,
) -> None:
    """List the strategies; with a NAME: its promise, its cost, its source, and an example."""
    if name is None:
        columns = [TableColumn("name"), TableColumn("what it does", wraps=True), TableColumn("options")]
        print_table(columns, [(key, entry.summary, ", ".join(entry.options)) for key, entry in STRATEGIES.items()])
        echo("\nschedules of a pipeline: " + ", ".join(SCHEDULE_NAMES))
        echo('strategies are joined by *, from the inside out: "pipeline(4) * data(2)" needs 8 ranks')
        return
    echo(describe(name, find_strategy(name)))


def describe(name: str, entry: StrategyEntry) -> str:
    """Return the description of a strategy."""
    text = parse_sections(entry.doc_source)
    parts = [f"{name}: {entry.summary}", text[""]]
    options = {
        key: line for key, line in parse_arguments(text.get("Args", "")).items() if key in {"degree", *entry.options}
    }
    if options:
        parts.append("\n".join(["options", *(f"  {key}: {line}" for key, line in options.items())]))
    if entry.unsupported:
        parts.append("\n".join(["not supported", *(f"  {key}: {why}" for key, why in entry.unsupported.items())]))
    promise = text.get("Promise", "the same results as on a single device, up to rounding")
    parts += [f"{title.lower()}\n{indent(text.get(title, promise))}" for title in SECTIONS]
    example = entry.example or f"{name}(2)"
    plan = Plan.parse(example)
    stages = [strategy for strategy in plan.strategies if isinstance(strategy, Pipeline)]
    plan = replace(plan, num_microbatches=stages[0].usable_microbatches(4) if stages else 1)
    compiled = compile(plan, linear_chain(default_blocks(plan)))
    program = compiled.program
    canonical = f", which is {plan}" if str(plan) != example else ""
    parts.append(f"example: {example}{canonical}, a model of {compiled.model.num_blocks} blocks")
    parts[-1] += f"\n{indent(abbreviate_program(program, width=100))}"
    parts.append(indent(draw_ascii_timeline(simulate(program, tick_costs(program)), tick_s=1.0, width=98)))
    return "\n\n".join(parts)


def parse_sections(documented: Callable[..., Any]) -> dict[str, str]:
    """Return the sections of a docstring by their title; the text before the first one has no title."""
    sections: dict[str, list[str]] = {"": []}
    title = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        head = _SECTION.match(line)
        if head is None:
            sections[title].append(line)
        else:
            title = head[1]
            sections[title] = []
    return {key: inspect.cleandoc("\n".join(["", *lines])).replace("``", "") for key, lines in sections.items()}


def parse_arguments(text: str) -> dict[str, str]:
    """Return the description of each argument in a docstring."""
    descriptions: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and name.isidentifier():
            descriptions[name] = rest
        elif descriptions:
            descriptions[list(descriptions)[-1]] += f" {line.strip()}"
    return descriptions


def indent(text: str) -> str:
    """Return a text indented by two columns."""
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())
