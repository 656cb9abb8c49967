"""``counterpoint bench``: claims are listed, measured and recorded; a missed bar is exit code 1."""

import json

import pytest
from typer.testing import CliRunner

from counterpoint.cli import bench as command
from counterpoint.cli.main import build_app
from counterpoint.cli.tables import TableColumn, format_table
from counterpoint.errors import DataError, LaunchError
from counterpoint.testing.claims import find_benchmarks, find_claim, read_claim, read_claims

CLAIM = "claim: one and one are two\ncommand: counterpoint bench sum\nbar: exactly 2\nsource: Peano, 1889\n"
RUN = """
from counterpoint.testing.claims import BenchmarkResult

def measure(options):
    found = 1 + (options.rounds or 1)
    missed = () if found == 2 else (f"the sum is {found}, not 2",)
    return BenchmarkResult(("what", "sum"), (("1 + 1", str(found)),), missed, {"sum": found})
"""


def run(*words):
    return CliRunner().invoke(build_app(words), list(words))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "sum").mkdir()
    (tmp_path / "sum" / "claim.yaml").write_text(CLAIM)
    (tmp_path / "sum" / "run.py").write_text(RUN)
    monkeypatch.setattr(command, "find_benchmarks", lambda: tmp_path)
    return tmp_path


def test_without_a_claim_all_are_listed_with_their_bars(folder):
    seen = run("bench")
    assert seen.exit_code == 0
    assert seen.output.splitlines()[1] == "sum    one and one are two  exactly 2"


def test_a_claim_that_holds_ends_with_0_and_its_figures_are_kept(folder):
    seen = run("bench", "sum", "--json", str(folder / "sum.json"))
    kept = json.loads((folder / "sum.json").read_text())
    assert seen.exit_code == 0
    assert "1 + 1  2" in seen.output
    assert (kept["holds"], kept["figures"], kept["source"]) == (True, {"sum": 2}, "Peano, 1889")
    assert {"cores", "torch", "load"} <= set(kept["machine"])


def test_a_missed_bar_is_reported_and_exits_with_1(folder):
    seen = run("bench", "sum", "--rounds", "2", "--json", str(folder / "sum.json"))
    assert seen.exit_code == 1
    assert "missed: the sum is 3, not 2" in seen.output
    assert json.loads((folder / "sum.json").read_text())["holds"] is False


def test_quick_runs_the_smallest_size_once_and_judges_no_bar(folder):
    (folder / "sum" / "run.py").write_text(
        RUN.replace("options.rounds or 1", "options.num_rounds(7) if options.is_quick else 9").replace(
            "found == 2", "0"
        )
    )
    seen = run("bench", "sum", "--quick")
    assert seen.exit_code == 0
    assert "1 + 1  2" in seen.output
    assert "missed" not in seen.output
    assert seen.output.splitlines()[-1] == "the benchmark runs; no bar was judged, because of --quick"


@pytest.mark.parametrize("option", [("--rounds", "2"), ("--json", "sum.json")])
def test_quick_figures_are_not_kept(folder, option):
    seen = run("bench", "sum", "--quick", *option)
    assert seen.exit_code == 1
    assert "its figures mean nothing; omit --quick to measure" in " ".join(seen.stderr.split())


def test_an_unknown_claim_suggests_the_nearest(folder):
    with pytest.raises(LaunchError, match=r"unknown claim 'sun'; did you mean sum\? the claims of .* are sum"):
        find_claim(folder, "sun")
    assert run("bench", "sun").exit_code == 1


def test_a_claim_with_an_unknown_field_names_it(folder):
    (folder / "sum" / "claim.yaml").write_text(CLAIM + "colour: blue\n")
    with pytest.raises(DataError, match=r"claim.yaml is not a valid claim[\s\S]*colour"):
        read_claim(folder / "sum" / "claim.yaml")


def test_a_claim_that_nothing_measures_says_what_is_missing(folder):
    (folder / "sum" / "run.py").unlink()
    assert "has no run.py with measure(options)" in run("bench", "sum").stderr


def test_what_this_repository_claims_can_be_read_and_measured():
    folder = find_benchmarks()
    claims = read_claims(folder)
    assert {"parity", "overhead"} <= set(claims)
    assert all(f"bench {name}" in claim.command for name, claim in claims.items())
    assert not [name for name in claims for file in ("run.py", "README.md") if not (folder / name / file).is_file()]


def test_a_plain_table_keeps_its_columns_apart():
    table = format_table([TableColumn("name"), TableColumn("s", "right")], [("a", "1.5"), ("bcdef", "10.0")])
    assert table.splitlines() == ["name      s", "a       1.5", "bcdef  10.0"]
