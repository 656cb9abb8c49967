"""``counterpoint plan``: a table that a person reads, or figures that a program reads."""

import json
import subprocess
import sys
from dataclasses import replace

from typer.testing import CliRunner

from counterpoint.cli.main import build
from counterpoint.world.cluster import Cluster, Level, Link
from counterpoint.world.cluster_file import write_cluster
from tests.planner.released import PROFILES

HEAVY = """
import sys
from counterpoint.cli.main import app
try:
    app(["plan", "-n", "2", "--blocks", "2"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


def plan(*words):
    return CliRunner().invoke(build(["plan"]), ["plan", *words])


def rows_of(result):
    """The lines of the table, without its head."""
    lines = result.output.splitlines()
    return lines[3 : [*lines, ""].index("", 3)]


def test_without_a_job_the_plans_are_listed_without_torch():
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"
    assert "data(2)" in done.stdout


def test_the_table_says_what_a_step_is_made_of_and_why_the_second_loses():
    result = plan("-n", "4", "--batch-size", "16", "--blocks", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].endswith("for -n 4 that can take 16 samples in a step; predicted, not measured")
    assert " ".join(lines[2].split()) == "plan micros step ms compute comm idle update sent memory why not"
    assert any(" comes second to " in line and " more of " in line for line in lines)
    assert len(rows_of(result)) == int(lines[0].split()[0])


def test_asynchronous_plans_are_marked():
    marked = [row for row in rows_of(plan("-n", "3", "--blocks", "2", "--batch-size", "12")) if " * " in row]
    assert marked
    assert all(any(late in row for late in ("consistency=asp) *", "order=pipedream")) for row in marked)


def test_top_shows_the_first_and_counts_the_rest():
    result = plan("-n", "2", "--blocks", "2", "--top", "3")
    assert len(rows_of(result)) == 3
    assert f"{int(result.output.split()[0]) - 3} plans more after these" in result.output


def test_one_rank_has_one_plan():
    result = plan("-n", "1")
    assert result.output.startswith("1 plan for -n 1 ")
    assert [row.split()[0] for row in rows_of(result)] == ["solo"]


def test_a_job_is_traced_and_its_microbatches_divide_its_batch():
    found = json.loads(plan("digits", "-n", "2", "--json").output)
    assert all(64 % one["num_microbatches"] == 0 for one in found["plans"])
    assert {"data(2)", "pipeline(2)", "zero(2, level=3)"} <= {one["plan"] for one in found["plans"]}
    times = [one["step_s"] for one in found["plans"]]
    assert times == sorted(times)


def test_what_cannot_be_carried_out_is_listed_with_its_reason():
    result = plan("-n", "2", "--blocks", "2", "--width", "5")
    assert "1 plan cannot be carried out:" in result.output
    assert "  tensor(2): tensor(2) cannot slice hidden of block0: 5 does not divide by 2" in result.output


def test_a_job_and_blocks_exclude_each_other():
    result = plan("digits", "-n", "2", "--blocks", "3")
    assert (result.exit_code, result.output) == (
        1, "PlanError: digits has blocks of its own, and --blocks is 3; give either a job or --blocks\n"
    )  # fmt: skip


def test_an_unknown_job_is_refused_with_the_nearest_name():
    result = plan("digit", "-n", "2")
    assert result.exit_code == 1
    assert "did you mean digits?" in result.output


def test_a_cluster_file_says_where_the_plans_would_run(tmp_path):
    file = tmp_path / "cluster.yaml"
    slow, fast = (replace(Cluster(), link=Link(1e-3, rate)) for rate in (1e6, 1e12))
    file.write_text(write_cluster(slow), encoding="utf-8")
    words = ("-n", "2", "--blocks", "2", "--json", "--cluster", str(file))
    before = json.loads(plan(*words).output)["plans"][0]["communication_s"]
    file.write_text(write_cluster(fast), encoding="utf-8")
    assert 0 <= json.loads(plan(*words).output)["plans"][0]["communication_s"] < before


def test_ranks_that_a_cluster_has_not_are_refused(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(write_cluster(Cluster(levels=(Level("host", 2, Link()),))), encoding="utf-8")
    assert plan("-n", "2", "--blocks", "2", "--cluster", str(file)).exit_code == 0
    result = plan("-n", "3", "--blocks", "2", "--cluster", str(file))
    assert result.output.startswith("PlanError: 3 ranks do not fit into a cluster of 2 (host=2); take as many ranks")


def test_a_profile_is_planned_for_and_the_stages_of_its_best_pipeline_are_named():
    result = plan("--graph", str(PROFILES / "vgg16.txt"), "-n", "2", "--batch-size", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].endswith(f"for -n 2, 4 minibatches of {PROFILES / 'vgg16.txt'} in a step")
    assert any(row.startswith("data(2) ") for row in rows_of(result))
    assert any(line.startswith("  stage 0 on rank 0: node2 Conv2d(3, 64, ") for line in lines)


def test_a_profile_that_is_not_there_or_stands_beside_a_job_is_refused():
    for words, message in (
        (["--graph", "missing.txt"], "missing.txt cannot be read: No such file or directory; give a graph.txt"),
        (["digits", "--graph", "graph.txt"], "graph.txt has layers of its own; leave out digits"),
    ):
        result = plan(*words, "-n", "2")
        assert result.exit_code == 1
        assert message in result.output
