import subprocess
import sys

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app


def run(*words):
    return CliRunner().invoke(build_app(words), list(words))


def test_a_pipeline_of_four_stages_and_eight_microbatches_has_the_published_bubble():
    shown = run("show", "pipeline(4, schedule=gpipe)", "-n", "4", "--microbatches", "8")
    assert shown.exit_code == 0
    assert "bubble 0.2727" in shown.output
    assert "rank 3 .  .  .  F0 F1" in shown.output
    assert "rules 1 to 8 hold" in shown.output


def test_more_ranks_than_can_be_shown_are_refused_at_once():
    shown = run("show", "data", "-n", "100000")
    assert shown.exit_code == 1
    assert shown.output.startswith("PlanError: data(100000) has 100000 ranks, and show draws up to 2048: ")


def test_the_instructions_of_each_rank_are_shown():
    shown = run("show", "data(2)", "--blocks", "1")
    assert "rank 0 F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0\n" in shown.output
    assert "rank 1 F0.1 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0\n" in shown.output


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("data(4, compress=topk:0.01)", "codec topk:0.01: the largest 1% of each parameter's elements, with their indices; "
         "50 times smaller, all-gathered, with error feedback"),
        ("data(2, compress=powersgd:2)", "codec powersgd:2: two factors of rank 2 for each matrix, all else uncompressed; "
         "64 times smaller, all-reduced, with error feedback"),
        ("data(2, reduce=adasum)", "codec adasum: every element uncompressed; parallel gradients are averaged, orthogonal "
         "ones added; 1 times smaller, all-gathered"),
        ("zero(2, level=3, quantized_gradients=int4)", "codec int4: every element rounded to one of 15 steps between the "
         "largest magnitude of 1024 elements and its negative; 7.94 times smaller, gradients reduce-scattered"),
    ],
)  # fmt: skip
def test_a_codec_is_described(plan, message):
    assert message in " ".join(run("show", plan, "--blocks", "1").output.split())


def test_the_plan_is_shown_as_yaml():
    shown = run("show", "pipeline(2) * data(2)", "--microbatches", "4", "--yaml")
    assert "strategy: pipeline(2) * data(2)\n" in shown.output
    assert "num_ranks: 4" in shown.output


def test_the_drawing_is_written_as_svg(tmp_path):
    run("show", "pipeline(2)", "--microbatches", "2", "--svg", str(tmp_path / "drawing.svg"))
    assert "<svg" in (tmp_path / "drawing.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpip(4)"], "did you mean gpipe?"),
        (["pipeline(4)", "-n", "3"], "pipeline(4) needs 4 ranks (stage=4), but there are 3"),
        (["data(2) * pipeline(2)"], "write pipeline(2) * data(...)"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_in_words(words, message):
    shown = run("show", *words)
    assert shown.exit_code == 1
    assert message in " ".join(shown.output.split())


def test_showing_a_program_never_loads_torch():
    code = "import sys; from counterpoint.cli.show import show; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_split_points_of_another_model_are_refused_with_the_names_of_the_shown_one():
    shown = run("show", "placement(2, modules=embed:0+blocks.0:1+head:0)", "-n", "2")
    assert shown.exit_code == 1
    assert "names embed, blocks.0, head, but show uses a model of its own, whose modules are block0 to" in shown.output
    assert run("show", "placement(2, modules=block0:0+block1:1+block2:0)", "-n", "2").exit_code == 0


def test_the_cost_is_that_of_the_precision():
    wide, narrow = (
        run("show", "zero(2, level=3)", "--blocks", "1", *options).output for options in ((), ("--precision", "bf16"))
    )
    assert "384 KiB" in wide
    assert "256 KiB" in narrow
