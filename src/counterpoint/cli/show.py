"""``counterpoint show``: the program of a plan, its timeline with equal ticks, and its cost."""

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

from counterpoint.cli.echo import echo
from counterpoint.cli.tables import TableColumn, format_bytes, format_table
from counterpoint.cli.workload import ScriptArguments, Which, Workload, load_workload, require_script
from counterpoint.compiler.compile import CompiledPlan, compile, storage_size_fn  # noqa: A004 - read as cp.compile
from counterpoint.errors import PlanError
from counterpoint.file_writer import require_writable, write_output
from counterpoint.launchers.script import is_script
from counterpoint.model.precision import parse_precision
from counterpoint.model.spec import ModelSpec, linear_chain
from counterpoint.plan.parser import explicit_microbatches
from counterpoint.plan.plan import Plan
from counterpoint.program.compression import encodes_shards, find_codec
from counterpoint.program.instruction import Backward, Collective
from counterpoint.program.program import Program
from counterpoint.program.rank_classes import find_rank_classes
from counterpoint.program.step_variants import StepVariant
from counterpoint.program.text import format_group, format_rank_program
from counterpoint.program.trace import Trace
from counterpoint.program.units import Unit
from counterpoint.simulator.cost_model import CostModel, unit_costs
from counterpoint.simulator.memory import peak_memory_bytes
from counterpoint.simulator.simulate import simulate
from counterpoint.strategies.pipeline.pipeline import Pipeline
from counterpoint.viz.ascii_timeline import abbreviate_program, draw_ascii_timeline
from counterpoint.viz.svg_timeline import draw_timeline
from counterpoint.world.topology import format_count

MAX_RANKS = 2048
"""With more ranks, verifying and drawing would take minutes, and show nothing new."""

MAX_RANKS_IN_FULL = 8
MAX_CLASSES = 16
VERIFIED_RULES = """rules 1 to 8 hold: messages match, no deadlock, collectives in order, all work done once,
                   weight versions and staleness, every gradient applied once, all freed, bytes as predicted"""


def show(
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|SCRIPT.py", help='Strategies joined by *, as "pipeline(4) * data(2)", or a script.'
        ),
    ],
    arguments: ScriptArguments = None,
    *,
    strategy: Annotated[str | None, typer.Option(help="With a script: another plan than its own.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", min=1, help="Number of ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches per replica.")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="Number of equal blocks of the model.")] = None,
    width: Annotated[int, typer.Option(min=1, help="A block is one linear layer, width x width.")] = 256,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", help="Pass to run on the program, for example overlap.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="What the blocks compute in, as bf16; a script says so itself.")
    ] = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Only print the plan as a plan.yaml.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also write the timeline to this file, as SVG.")] = None,
    which: Which = 1,
) -> None:
    """Show the program of a plan: its instructions, a timeline and its cost.

    With a script it is the program of its own cp.Trainer or cp.parallelize, on its own model: the script is run until
    its first batch, and trains nothing.

    In the timeline each forward and each backward takes one tick; if backwards are split, each half does.
    """
    require_writable(svg)
    require_script(plan, arguments)
    if is_script(plan):
        if blocks is not None:
            raise PlanError(f"{plan} has a model of its own, and --blocks is {blocks}; omit --blocks")
        if precision is not None:
            raise PlanError(f"{plan} says itself what it computes in, and --precision is {precision}; omit --precision")
        workload = load_workload(plan, arguments or (), which)
        with gc_disabled():
            compiled = compile_workload(workload, strategy, ranks, microbatches, passes)
            shown = compiled.plan.to_yaml() if yaml else format_compiled(compiled, svg)
        echo(shown, nl=not yaml)
        return
    if strategy is not None:
        raise PlanError(f"--strategy {strategy} is for a script; {plan} is the plan to show")
    parsed = replace(read_plan(plan, ranks, microbatches, tuple(passes or ())), precision=parse_precision(precision))
    if yaml:
        echo(parsed.to_yaml(), nl=False)
        return
    with gc_disabled():
        model = linear_chain(blocks or default_blocks(parsed), width=width, precision=parsed.precision)
        check_module_names(parsed, model)
        shown = format_compiled(compile(parsed, model), svg)
    echo(shown)


def compile_workload(
    workload: Workload,
    strategy: str | None,
    num_ranks: int | None,
    num_microbatches: int | None,
    passes: Sequence[str] | None,
) -> CompiledPlan:
    """Return the plan of a script, or another one, compiled for its model as the first step would.

    Raises:
        PlanError: the plan and the model do not fit together.
    """
    from counterpoint.fabric.local import LocalWorld
    from counterpoint.training.model_checks.validation import min_microbatch_size
    from counterpoint.training.plan_resolution import MAX_TRACE_SAMPLES, RequestedPlan, make_auto_strategy
    from counterpoint.training.ranks.local_ranks import LocalRanks

    requested = workload.requested_plan
    if requested is None or strategy is not None:
        requested = RequestedPlan(strategy or "solo")
    if num_microbatches is not None or passes is not None:
        requested = replace(
            requested,
            num_microbatches=num_microbatches or requested.num_microbatches,
            passes=requested.passes if passes is None else tuple(passes),
        )
    plan, size = requested.resolve(num_ranks or 1), workload.batch_size
    auto_strategy = make_auto_strategy(requested, plan, workload.options)
    if auto_strategy is not None:
        inputs = workload.inputs(MAX_TRACE_SAMPLES)
        plan = auto_strategy.choose_plan(workload.model, workload.optimizer_spec, inputs, workload.options, size)
    elif not requested.has_explicit_microbatches:
        plan = plan.with_microbatches_for(size, min_samples=min_microbatch_size(workload.model))
    if num_ranks is not None:
        plan.require_ranks(num_ranks)
    plan.require_batch(size)
    require_drawable(plan)
    world = LocalWorld(plan.num_ranks)
    try:
        local_ranks = LocalRanks(world, plan, workload.model, workload.loss, workload.optimizer_spec, workload.options)
        batch = workload.make_batch(size, plan.global_num_microbatches)
        local_ranks.compile_plan(batch.inputs(0), batch.sizes[0])
    finally:
        world.close()
    assert local_ranks.compiled is not None, "compiled"
    return local_ranks.compiled


def format_compiled(compiled: CompiledPlan, svg: Path | None) -> str:
    """Return the program of a plan, its timeline and its cost as text, and write the timeline to a file if asked to."""
    columns = shutil.get_terminal_size((100, 24)).columns
    program = compiled.step_variants[-1].full_program
    trace = simulate(program, tick_costs(program))
    cells = [
        format_heading(compiled),
        format_rows(compiled, columns),
        draw(trace, columns),
        format_costs(compiled, trace),
    ]
    if svg is None:
        return "\n\n".join(cells)
    write_output(svg, draw_timeline(trace))
    return "\n".join(["\n\n".join(cells), f"drawing  {svg}"])


def check_module_names(plan: Plan, model: ModelSpec) -> None:
    """Check that the split points of a plan name modules of the model that is shown, which is not the user's.

    Raises:
        PlanError: one does not.
    """
    names = [piece.name for piece in model.layers]
    cuts = dict.fromkeys(
        mark.module
        for strategy in plan.strategies
        if isinstance(strategy, Pipeline)
        for mark in strategy.parsed_split_points
    )
    foreign = [cut for cut in cuts if cut not in names]
    if foreign:
        own = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        raise PlanError(
            f"{plan} names {', '.join(foreign)}, but show uses a model of its own, whose modules are {own}; "
            "use these names, and set the number of blocks with --blocks"
        )


def tick_costs(program: Program) -> CostModel:
    """Return the costs of one tick for all computations except updates."""
    has_parts = any(isinstance(instruction, Backward) and instruction.part for _, instruction in program.instructions())
    return unit_costs(backward_ticks=2 if has_parts else 1)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: it would scan hundreds of thousands of instructions, which have no cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_plan(text: str, ranks: int | None, microbatches: int | None, passes: tuple[str, ...]) -> Plan:
    """Return the plan for the given ranks; by default a pipeline gets two microbatches per stage.

    Raises:
        PlanError: the text is not a plan, or needs another number of ranks, or too many.
    """
    plan = Plan.parse(text, num_ranks=ranks, num_microbatches=microbatches)
    if ranks is not None:
        plan.require_ranks(ranks)
    require_drawable(plan)
    stages = [strategy for strategy in plan.strategies if isinstance(strategy, Pipeline)]
    if stages and microbatches is None and explicit_microbatches(text) is None:
        plan = replace(plan, num_microbatches=stages[0].usable_microbatches(2 * stages[0].degree))
    return replace(plan, passes=passes)


def require_drawable(plan: Plan) -> None:
    """Check that a plan has few enough ranks.

    Raises:
        PlanError: it has more.
    """
    if plan.num_ranks > MAX_RANKS:
        raise PlanError(
            f"{plan} has {plan.num_ranks} ranks, and show draws up to {MAX_RANKS}: it verifies each of them; "
            "show the plan with fewer ranks"
        )


def default_blocks(plan: Plan) -> int:
    """Return one block per chunk of a stage, or as a balance or a placement needs; two without a pipeline."""
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
        f"model         {format_count(compiled.model.num_blocks, 'block')} with {size} of parameters",
        *(f"codec         {line}" for line in describe_codecs(compiled)),
    ]
    if len(compiled.step_variants) > 1:
        lines.append(
            f"steps         {', '.join(map(format_frequency, compiled.step_variants))}; the last kind is drawn"
        )
    return "\n".join(lines)


def describe_codecs(compiled: CompiledPlan) -> list[str]:
    """Return what every codec of the plan does, and how much it compresses gradients or gathered weights."""
    units_of: dict[tuple[str, str], set[Unit]] = {}
    for _, instruction in compiled.program.instructions():
        if isinstance(instruction, Collective) and instruction.codec:
            units_of.setdefault((instruction.codec, instruction.op), set()).add(instruction.tensor.blocks)
    lines = []
    for (text, op), units in units_of.items():
        codec = find_codec(text)
        full_bytes = sum(compiled.model.unit_bytes(unit) for unit in units)
        encoded_bytes = sum(compiled.model.unit_bytes(unit, text) for unit in units)
        sent = "all-gathered" if codec.spec.reduction == "gather" else "all-reduced"
        feedback = ", with error feedback" if codec.spec.has_error_feedback else ""
        if encodes_shards(op, text):
            sent, feedback = ("weights gathered" if op == "all_gather" else "gradients reduce-scattered"), ""
        lines.append(f"{text}: {codec.summary}; {full_bytes / encoded_bytes:.3g} times smaller, {sent}{feedback}")
    return lines


def format_frequency(variant: StepVariant) -> str:
    """Return which fraction of all steps are of a kind; only the name of kinds that end."""
    if not variant.frequency:
        return f"{variant.name} at the beginning"
    return variant.name if variant.frequency == 1 else f"{variant.frequency} {variant.name}"


def format_rows(compiled: CompiledPlan, columns: int) -> str:
    """Return the instructions of every kind of step; an asynchronous pipeline has them all in its three parts."""
    if compiled.plan.sync_schedule.sync_every == 1:
        return format_program_rows(compiled.program, columns)
    return "\n".join(
        f"{variant.name}\n{format_program_rows(variant.program, columns)}" for variant in compiled.step_variants
    )


def format_program_rows(program: Program, columns: int) -> str:
    """Return the instructions of each rank, or with many ranks those of one rank per class."""
    if program.num_ranks <= MAX_RANKS_IN_FULL:
        return abbreviate_program(program, width=10_000, max_ranks=MAX_RANKS_IN_FULL)
    groups = find_rank_classes(program)
    lines = []
    for ranks in groups[:MAX_CLASSES]:
        text = format_rank_program(program.rank_programs[ranks[0]], all_parts=program.is_async_pipeline)
        lines += [f"ranks {format_ranks(ranks)} ({len(ranks)} equal)", f"  {abbreviate(text, 3 * columns)}"]
    if len(groups) > MAX_CLASSES:
        lines.append(f"and {len(groups) - MAX_CLASSES} more classes of ranks")
    return "\n".join(lines)


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as a group, or the first few and the last one.

    Example:
        >>> format_ranks((0, 4, 8)), format_ranks((0, 1, 4, 5, 8, 9))
        ('0-8/4', '0,1,4,..,9')
    """
    text = format_group(tuple(ranks))
    if text.count(",") < 4:
        return text
    return f"{ranks[0]},{ranks[1]},{ranks[2]},..,{ranks[-1]}"


def abbreviate(text: str, max_length: int) -> str:
    """Return a rank program in about ``max_length`` characters, with the number of omitted instructions."""
    instructions = text.split()
    kept = max_length * len(instructions) // len(text) // 2
    if len(instructions) <= 2 * kept + 1:
        return text
    return " ".join([*instructions[:kept], f"..{len(instructions) - 2 * kept}..", *instructions[-kept:]])


def draw(trace: Trace, columns: int) -> str:
    """Return the timeline, one column per tick."""
    return draw_ascii_timeline(trace, tick_s=1.0, width=columns, max_ranks=MAX_CLASSES)


def format_costs(compiled: CompiledPlan, trace: Trace) -> str:
    """Return bubble, bytes and microbatches in flight for each kind of rank."""
    sent = compiled.sent_bytes()
    memory = peak_memory_bytes(compiled.step_variants[-1].full_program, storage_size_fn(compiled.model, 1))
    busy_ticks: Counter[int] = Counter()
    for event in trace.events:
        if event.lane == "compute":
            busy_ticks[event.rank] += round(event.seconds)
    ranks_by_row: dict[tuple[str, ...], list[int]] = {}
    for rank in range(compiled.program.num_ranks):
        cells = (
            f"{busy_ticks[rank]} of {trace.step_s:g}",
            format_bytes(sent[rank]),
            format_bytes(memory[rank]),
            str(compiled.symbolic.peak_in_flight[rank]),
        )
        ranks_by_row.setdefault(cells, []).append(rank)
    sent_title = "sent per step" if len(compiled.step_variants) == 1 else "sent, mean step"
    titles = ("ranks", "busy ticks", sent_title, "memory", "peak in flight")
    table = format_table(
        [TableColumn(titles[0]), *(TableColumn(title, "right") for title in titles[1:])],
        [(format_ranks(ranks), *cells) for cells, ranks in ranks_by_row.items()],
    )
    return f"{table}\n\nbubble {trace.bubble:.4f}\n{VERIFIED_RULES}"
