"""Split points by the names of modules: where chunks begin, on which stages they lie, and which are refused."""

import pytest

from counterpoint.compiler.compile import compile as compile_plan
from counterpoint.errors import PlanError
from counterpoint.model.spec import Block, LayerSpec, ModelSpec, Param, linear_chain
from counterpoint.plan.plan import Plan
from counterpoint.program.text import format_program
from tests.program.verify.random_plans import compile_text


def blocks_of_ranks(text, blocks):
    return [rank.blocks for rank in compile_text(text, m=2, blocks=blocks).cost.ranks]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("pipeline(2, split_points=block3)", [(0, 1, 2), (3,)]),
        ("pipeline(3, split_points=block1+block2)", [(0,), (1,), (2, 3)]),
        ("pipeline(2, split_points=block1, replicas=(1,2))", [(0,), (1, 2, 3), (1, 2, 3)]),
        ("pipedream(2, split_points=block3)", [(0, 1, 2), (3,)]),
        ("interleaved(2, split_points=block1+block2+block3)", [(0, 2), (1, 3)]),
        ("zero_bubble(2, chunks_per_stage=2, split_points=block1+block2+block3)", [(0, 3), (1, 2)]),
        ("gpipe(2, split_points=block0:0+block1:1+block3:0)", [(0, 3), (1, 2)]),
        ("gpipe(2, split_points=block0:1+block1:0+block2:0+block3:1)", [(1, 2), (0, 3)]),
        ("gpipe(3, split_points=block0:2+block1:0+block2:1)", [(1,), (2, 3), (0,)]),
    ],
)
def test_chunks_begin_with_the_modules_that_are_named(text, blocks):
    assert blocks_of_ranks(text, 4) == blocks


def test_cuts_are_the_balance_that_has_the_same_stages():
    named, counted = (
        compile_text(f"pipeline(2, {option})", m=3, blocks=4) for option in ("split_points=block3", "balance=(3,1)")
    )
    assert format_program(named.program) == format_program(counted.program)
    assert named.cost == counted.cost


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("pipeline(3, split_points=a.b+c)", ("a.b", "c")),
        ("pipeline(3, schedule=gpipe, split_points=a:0+b.1:2+c:1)", ("b.1", "c")),
    ],
)
def test_split_points_read_back_as_written_and_name_the_modules_to_split_at(text, modules):
    assert str(Plan.parse(text)) == text
    assert Plan.parse(text).split_modules == modules


def model_with_a_bare_block():
    layers = [
        LayerSpec("embed", ("w0",)),
        LayerSpec("act", ()),
        LayerSpec("head", ("w1",), modules_started=("top", "top.0")),
    ]
    blocks = tuple(Block((layer,), index) for index, layer in enumerate(layers))
    return ModelSpec(blocks, (Param("w0", (4,)), Param("w1", (4,))))


def refusal(text, model):
    with pytest.raises(PlanError) as caught:
        compile_plan(Plan.parse(text, num_microbatches=2), model)
    return str(caught.value)


def test_a_module_is_known_by_every_path_that_begins_with_its_block():
    compiled_plan = compile_plan(Plan.parse("pipeline(2, split_points=top)"), model_with_a_bare_block())
    assert [rank.blocks for rank in compiled_plan.cost.ranks] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pipeline(2, split_points=blokc2)",
            "names 'blokc2', with which no block begins; did you mean 'block2'? blocks begin ",
        ),
        ("pipeline(3, split_points=block2+block1)", "'block1' runs before 'block2'; write split_points=block1+block2"),
        (
            "pipeline(2, split_points=block0)",
            "the model begins with 'block0', so that a stage would have no work;",
        ),
        (
            "gpipe(2, split_points=block1:0+block2:1)",
            "begins with 'block1', but the model begins with 'block0', which has no",
        ),
        (
            "pipeline(3, split_points=block1)",
            "names 1 module with which a stage begins, but 3 stages need 2, one for each but",
        ),
        (
            "pipeline(2, split_points=block1+block2)",
            "names 2 modules with which a stage begins, but 2 stages need 1, one for",
        ),
        (
            "interleaved(2, split_points=block1)",
            "names 1 module with which a chunk begins, but 4 chunks need 3, one for each",
        ),
        ("pipeline(2, split_points=block1, balance=(1,3))", "both say where stages begin; drop one of the two"),
        ("pipeline(3, split_points=block1+block1)", "names 'block1' 2 times; a module begins one chunk"),
        (
            "pipeline(2, split_points=block1:0+block2:1)",
            "which needs schedule=gpipe, chunks_per_stage=1 and no replicas",
        ),
        (
            "gpipe(2, split_points=block0:0+block1)",
            "gives the stage of block0, but not of block1; give the stages of",
        ),
        (
            "gpipe(2, split_points=block0:0+block1:2)",
            "has block1 on stage 2, but the stages are 0 to 1; give one of these, or 3",
        ),
        (
            "gpipe(2, split_points=block0:0+block1:0)",
            "has no module on stage 1; every stage needs work: put a module there, or give 1 stage",
        ),
        (
            "placement(3, modules=block0:0+block1:2)",
            "put a module there, or give 2 stages and put the modules on stages 0 to 1",
        ),
        ("placement(2, modules=block0:1)", "put a module there, or give 1 stage and put the modules on stage 0"),
        (
            "gpipe(2, split_points=block0:0+block1:²)",
            "has 'block1:²'; write the path of a module, or module:stage with its",
        ),
        (
            "gpipe(2, split_points=block0:first)",
            "has 'block0:first'; write the path of a module, or module:stage with its stage",
        ),
    ],
)
def test_invalid_split_points_are_refused_with_the_text_to_write(text, message):
    assert message in refusal(text, linear_chain(4))


def test_a_stage_without_parameters_is_named_by_its_ends():
    assert "leaves no parameters between 'act' up to 'top'; every stage trains" in refusal(
        "pipeline(3, split_points=act+top)", model_with_a_bare_block()
    )
    assert "'top' and 'top.0' begin with the same block, so that a stage would have no work;" in refusal(
        "pipeline(3, split_points=top+top.0)", model_with_a_bare_block()
    )
