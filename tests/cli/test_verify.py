"""`counterpoint verify`: a program in a file is verified by the rules of the plans."""

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app

TWO_REPLICAS = "F0.0 B0.0 all_reduce(grad0)@0,1 commit@0,1 U0\nF0.1 B0.1 all_reduce(grad0)@0,1 commit@0,1 U0\n"


def verify(folder, text):
    path = folder / "program.txt"
    path.write_text(text, encoding="utf-8")
    return CliRunner().invoke(build_app(["verify"]), ["verify", str(path)])


def test_a_right_program_is_described(tmp_path):
    shown = verify(tmp_path, TWO_REPLICAS)
    assert (shown.exit_code, shown.stdout) == (
        0, "2 ranks, 1 unit, 2 microbatches, at most 1 in flight on a rank; rules 1 to 7 hold\n"
    )  # fmt: skip


def test_the_lines_that_show_prints_are_a_program(tmp_path):
    shown = CliRunner().invoke(build_app(["show"]), ["show", "pipeline(2) * data(2)", "--microbatches", "2"]).stdout
    lines = [line for line in shown.split("\n\n")[1].splitlines() if line.startswith("rank ")]
    assert verify(tmp_path, "\n".join(lines)).stdout.startswith("4 ranks, 2 units, 4 microbatches, at most 2 in")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO_REPLICAS.replace(" U0", "", 1), "ProgramError: verifier rule 6 violated: "),
        (TWO_REPLICAS.replace("all_reduce(grad0)@0,1 ", "", 1), "ProgramError: verifier rule 3 violated: "),
        ("F0.0 X0.0", "ProgramError: line 1: "),
        ("\n", "PlanError: "),
    ],
)
def test_a_wrong_program_fails_with_its_place(tmp_path, text, message):
    shown = verify(tmp_path, text)
    assert (shown.exit_code, shown.stderr.startswith(message)) == (1, True)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    shown = CliRunner().invoke(build_app(["verify"]), ["verify", str(tmp_path / "none.txt")])
    assert (shown.exit_code, "none.txt cannot be read: No such file or directory; give a file" in shown.stderr) == (
        1,
        True,
    )
