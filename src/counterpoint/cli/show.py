"""``counterpoint show``: the program of a plan, its drawing on a clock of equal ticks, and what it costs."""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from counterpoint.cli.tables import TableColumn, format_bytes, format_table
from counterpoint.compiler.compile import CompiledPlan, compile, storage_size_fn  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.model.spec import ModelSpec, linear_chain
from counterpoint.plan.parser import explicit_microbatches
from counterpoint.plan.plan import Plan
from counterpoint.program.compression import find_codec
from counterpoint.program.instruction import Backward, Collective
from counterpoint.program.program import Program
from counterpoint.program.rank_classes import find_rank_classes
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.text import format_group, format_rank_program
from counterpoint.program.trace import Trace
from counterpoint.simulator.cost_model import CostModel, unit_costs
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.viz.ascii_timeline import abbreviate_program, draw_ascii_timeline
from counterpoint.viz.svg_timeline import draw_timeline

MAX_RANKS = 2048
"""For more, proving and drawing would take minutes, and show nothing that fewer ranks do not."""

MAX_RANKS_IN_FULL = 8
MAX_CLASSES = 16
VERIFIED_RULES = """laws 1 to 8 hold: messages pair up, nothing waits for ever, collectives in one order, all work done once,
                  versions and staleness, every gradient counted once, all released, bytes as promised"""


def show(
    plan: Annotated[str, typer.Argument(help='Strategies joined by *, for instance "pipeline(4) * data(2)".')],
    *,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Ranks there are.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Of the innermost program.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Equal blocks of the model.")] = None,
    width: Annotated[int, typer.Option(min=1, help="A block is one linear layer, width x width.")] = 256,
    passes: Annotated[list[str] | None, typer.Option("--pass", help="Run on the program, overlap for one.")] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Only print the plan as a run's plan.yaml has it.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the drawing to this file.")] = None,
) -> None:
    """Show the program of a plan: its rows, a drawing in which every forward and backward takes one tick, its cost.

    Where backwards have two parts, each part takes one.
    """
    parsed = read_plan(plan, ranks, microbatches, tuple(passes or ()))
    if yaml:
        typer.echo(parsed.to_yaml(), nl=False)
        return
    columns = shutil.get_terminal_size((100, 24)).columns
    with gc_disabled():
        model = linear_chain(blocks or default_blocks(parsed), width=width)
        check_module_names(parsed, model)
        compiled = compile(parsed, model)
        program = compiled.step_variants[-1].full_program
        trace = simulate(program, tick_costs(program))
        shown = [
            format_heading(compiled),
            format_rows(compiled, columns),
            draw(trace, columns),
            format_costs(compiled, trace),
        ]
    typer.echo("\n\n".join(shown))
    if svg is not None:
        svg.write_text(draw_timeline(trace), encoding="utf-8")
        typer.echo(f"drawing  {svg}")


def check_module_names(plan: Plan, model: ModelSpec) -> None:
    """Check that a plan's cuts name modules of the model that is shown, which is not the user's.

    Raises:
        PlanError: one does not.
    """
    names = [piece.name for piece in model.layers]
    cuts = dict.fromkeys(
        mark.module for one in plan.strategies if isinstance(one, Pipeline) for mark in one.parsed_split_points
    )
    foreign = [cut for cut in cuts if cut not in names]
    if foreign:
        own = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        raise PlanError(
            f"{plan} names {', '.join(foreign)}, but show draws a model of its own, whose modules are {own}; to see "
            "the plan write these, and say how many there are with --blocks"
        )


def tick_costs(program: Program) -> CostModel:
    """Return costs of one tick for everything that computes but updates."""
    has_parts = any(isinstance(word, Backward) and word.part for _, word in program.instructions())
    return unit_costs(backward_ticks=2 if has_parts else 1)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Look for no cycles meanwhile: in hundreds of thousands of instructions there are none, and it takes a quarter."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_plan(text: str, ranks: int | None, microbatches: int | None, passes: tuple[str, ...]) -> Plan:
    """Return the plan for the ranks there are; by default a pipeline gets two microbatches per stage.

    Raises:
        PlanError: the text is no plan, or needs another number of ranks, or too many.
    """
    plan = Plan.parse(text, num_ranks=ranks, num_microbatches=microbatches)
    if ranks is not None:
        plan.require_ranks(ranks)
    if plan.num_ranks > MAX_RANKS:
        raise PlanError(
            f"{plan} has {plan.num_ranks} ranks, and show draws up to {MAX_RANKS}: it proves a row for each; "
            "show the plan with fewer ranks, the rows are alike"
        )
    stages = [strategy for strategy in plan.strategies if isinstance(strategy, Pipeline)]
    if stages and microbatches is None and explicit_microbatches(text) is None:
        plan = replace(plan, num_microbatches=stages[0].usable_microbatches(2 * stages[0].degree))
    return replace(plan, passes=passes)


def default_blocks(plan: Plan) -> int:
    """Return one block per chunk of a stage, or as a balance or a placement has; two without a pipeline."""
    for strategy in plan.strategies:
        if isinstance(strategy, Pipeline):
            return sum(strategy.balance) or max(len(strategy.split_points), strategy.degree * strategy.num_stage_chunks)
    return 2


def format_heading(compiled: CompiledPlan) -> str:
    """Return the plan, its ranks and its microbatches."""
    plan = compiled.plan
    size = format_bytes(sum(param.num_bytes for param in compiled.model.params))
    lines = [
        f"plan          {plan}" + "".join(f" + {name}" for name in plan.passes),
        f"ranks         {plan.num_ranks} ({plan.mesh.describe()})",
        f"microbatches  {plan.num_microbatches}, {plan.global_num_microbatches} in the global batch",
        f"model         {compiled.model.num_blocks} blocks with {size} of parameters",
        *(f"code          {line}" for line in describe_codecs(compiled)),
    ]
    if len(compiled.step_variants) > 1:
        lines.append(
            f"steps         {', '.join(map(format_frequency, compiled.step_variants))}; the last kind is drawn"
        )
    return "\n".join(lines)


def describe_codecs(compiled: CompiledPlan) -> list[str]:
    """Return what every code of the plan's sums does, and how small it makes gradients."""
    sums = [word for _, word in compiled.program.instructions() if isinstance(word, Collective) and word.codec]
    units = {word.codec: {one.tensor.blocks for one in sums if one.codec == word.codec} for word in sums}
    lines = []
    for text, summed in units.items():
        code = find_codec(text)
        plain, written = (sum(compiled.model.unit_bytes(unit, how) for unit in summed) for how in ("", text))
        sent = "gathered by all" if code.spec.reduction == "gather" else "added up on the way"
        kept = "; what is not sent is kept for the next step" if code.spec.has_error_feedback else ""
        lines.append(f"{text}: {code.summary}; {plain / written:.3g} times smaller, {sent}{kept}")
    return lines


def format_frequency(variant: StepVariant) -> str:
    """Return which part of all steps are of a kind; a kind that ends is only named."""
    if not variant.frequency:
        return f"{variant.name} at the beginning"
    return variant.name if variant.frequency == 1 else f"{variant.frequency} {variant.name}"


def format_rows(compiled: CompiledPlan, columns: int) -> str:
    """Return the rows of every kind of step; a stream has them all in its three parts."""
    if compiled.plan.sync_schedule.sync_every == 1:
        return format_program_rows(compiled.program, columns)
    return "\n".join(f"{turn.name}\n{format_program_rows(turn.program, columns)}" for turn in compiled.step_variants)


def format_program_rows(program: Program, columns: int) -> str:
    """Return the rows, or where there are many ranks one row for all that do the same."""
    if program.num_ranks <= MAX_RANKS_IN_FULL:
        return abbreviate_program(program, width=10_000, max_ranks=MAX_RANKS_IN_FULL)
    groups = find_rank_classes(program)
    lines = []
    for ranks in groups[:MAX_CLASSES]:
        text = format_rank_program(program.rank_programs[ranks[0]], all_parts=program.is_async_pipeline)
        lines += [f"ranks {format_ranks(ranks)} ({len(ranks)} alike)", f"  {abbreviate(text, 3 * columns)}"]
    if len(groups) > MAX_CLASSES:
        lines.append(f"and {len(groups) - MAX_CLASSES} more kinds of rows")
    return "\n".join(lines)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as in a group, or the first few and the last one.

    Example:
        >>> named((0, 4, 8)), named((0, 1, 4, 5, 8, 9))
        ('0-8/4', '0,1,4,..,9')
    """
    text = format_group(tuple(ranks))
    if text.count(",") < 4:
        return text
    return f"{ranks[0]},{ranks[1]},{ranks[2]},..,{ranks[-1]}"


def abbreviate(text: str, max_length: int) -> str:
    """Return a row of at most about so many characters, the words in its middle counted instead."""
    words = text.split()
    kept = max_length * len(words) // len(text) // 2
    if len(words) <= 2 * kept + 1:
        return text
    return " ".join([*words[:kept], f"..{len(words) - 2 * kept}..", *words[-kept:]])


def draw(trace: Trace, columns: int) -> str:
    """Return the drawing, one column per tick."""
    return draw_ascii_timeline(trace, tick_s=1.0, width=columns, max_ranks=MAX_CLASSES)


def format_costs(compiled: CompiledPlan, trace: Trace) -> str:
    """Return bubble, bytes and microbatches in flight, for each kind of rank."""
    sent = compiled.sent_bytes()
    memory = peak_memory_bytes(compiled.step_variants[-1].full_program, storage_size_fn(compiled.model, 1))
    busy: Counter[int] = Counter()
    for event in trace.events:
        if event.lane == "compute":
            busy[event.rank] += round(event.seconds)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for rank in range(compiled.program.num_ranks):
        shown = (
            f"{busy[rank]} of {trace.step_s:g}",
            format_bytes(sent[rank]),
            format_bytes(memory[rank]),
            str(compiled.symbolic.peak_in_flight[rank]),
        )
        kinds.setdefault(shown, []).append(rank)
    sent_title = "sent per step" if len(compiled.step_variants) == 1 else "sent, mean step"
    titles = ("ranks", "busy ticks", sent_title, "memory", "peak in flight")
    table = format_table(
        [TableColumn(titles[0]), *(TableColumn(title, "right") for title in titles[1:])],
        [(format_ranks(ranks), *shown) for shown, ranks in kinds.items()],
    )
    return f"{table}\n\nbubble {trace.bubble:.4f}\n{VERIFIED_RULES}"
