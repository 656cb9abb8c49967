"""``counterpoint plan``: a table for people, JSON for programs."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.cli.plan import build_equal_blocks
from counterpoint.model.model_profile import format_profile
from counterpoint.plan.plan import Plan
from counterpoint.world.cluster import Cluster, Level, Link
from counterpoint.world.cluster_file import format_cluster
from tests.model.profiles import build_profile, layer_profile
from tests.planner.pipeline.released_optimizer import PROFILES
from tests.viz.html_validity import find_html_errors

HEAVY = """
import sys
from counterpoint.cli.main import app
try:
    app(["plan", "-n", "2", "--blocks", "2"])
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


def plan(*words):
    return CliRunner().invoke(build_app(["plan"]), ["plan", *map(str, words)])


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
    assert any(" is second to " in line and " more of " in line for line in lines)
    assert len(rows_of(result)) == int(lines[0].split()[0])


def test_asynchronous_plans_are_marked():
    marked = [row for row in rows_of(plan("-n", "3", "--blocks", "2", "--batch-size", "12")) if " * " in row]
    assert marked
    assert all(any(late in row for late in ("consistency=asp) *", "schedule=pipedream")) for row in marked)


def test_top_shows_the_first_and_counts_the_rest():
    result = plan("-n", "2", "--blocks", "2", "--top", "3")
    assert len(rows_of(result)) == 3
    assert f"{int(result.output.split()[0]) - 3} plans more after these" in result.output


def test_one_rank_has_one_plan():
    result = plan("-n", "1")
    assert result.output.startswith("1 plan for -n 1 ")
    assert [row.split()[0] for row in rows_of(result)] == ["solo"]


def test_a_job_is_traced_and_its_microbatches_divide_its_batch():
    actual = json.loads(plan("digits", "-n", "2", "--json").output)
    assert all(64 % one["num_microbatches"] == 0 for one in actual["plans"])
    assert {"data(2)", "pipeline(2)", "zero(2, level=3)"} <= {one["plan"] for one in actual["plans"]}
    times = [one["step_s"] for one in actual["plans"]]
    assert times == sorted(times)


def test_what_cannot_be_carried_out_is_listed_with_its_reason():
    result = plan("-n", "2", "--blocks", "2", "--width", "5")
    assert "1 plan cannot be run:" in result.output
    assert "  tensor(2): tensor(2) cannot shard hidden of block0: 5 is not divisible by 2" in result.output


def test_a_job_and_blocks_exclude_each_other():
    result = plan("digits", "-n", "2", "--blocks", "3")
    assert (result.exit_code, result.output) == (
        1, "PlanError: digits has blocks of its own, and --blocks is 3; give either a job or --blocks\n"
    )  # fmt: skip


def test_an_unknown_job_is_refused_with_the_nearest_name():
    result = plan("digit", "-n", "2")
    assert result.exit_code == 1
    assert "did you mean digits?" in result.output


@pytest.mark.long
def test_it_says_which_plan_is_taken_and_why():
    *_, taken = plan("-n", "4", "--batch-size", "16", "--blocks", "4").output.splitlines()
    assert taken.startswith(
        "pipeline(4, schedule=gpipe) with 8 microbatches was chosen: it is predicted within 10 % of pipeline(4,"
    )


def test_the_plan_that_is_taken_is_written_to_a_file_that_reads_back(tmp_path):
    result = plan("-n", "2", "--blocks", "2", "--json", "--out", tmp_path / "plan.yaml")
    taken = Plan.from_file(tmp_path / "plan.yaml")
    assert json.loads(result.stdout)["taken"] == {
        "plan": str(taken), "num_microbatches": taken.num_microbatches, "passes": ["overlap"]
    }  # fmt: skip


def test_memory_of_ranks_with_different_amounts_is_shown_from_least_to_most():
    actual = json.loads(plan("-n", "2", "--blocks", "2", "--json").stdout)["plans"]
    uneven = [one for one in actual if len(set(one["rank_bytes"])) > 1]
    assert uneven
    assert all(one["memory_bytes"] == max(one["rank_bytes"]) for one in actual)
    assert " - " in next(row for row in rows_of(plan("-n", "2", "--blocks", "2")) if uneven[0]["plan"] in row)


@pytest.mark.long
def test_where_nothing_fits_it_says_by_how_much_and_what_would():
    result = plan("-n", "2", "--blocks", "4", "--memory", "0.02")
    assert result.exit_code == 0
    last = result.output.splitlines()[-1]
    assert last.startswith("no plan fits: pipeline(2) needs least, 33")
    assert "bytes too many; the smallest change that fits: " in last
    refused = plan("-n", "2", "--blocks", "4", "--memory", "0.02", "--out", "plan.yaml")
    assert (refused.exit_code, refused.output.startswith("PlanError: no plan fits")) == (1, True)


def test_a_page_has_the_plans_and_their_timelines(tmp_path):
    result = plan("-n", "2", "--blocks", "2", "--report", tmp_path / "report.html")
    assert result.exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert find_html_errors(page) == []
    assert "One step under the best plans, simulated" in page


def test_measuring_needs_a_job():
    result = plan("-n", "2", "--measure", "2")
    assert (result.exit_code, result.output) == (
        1, "PlanError: --measure 2 trains for some steps and needs a model and data; give a job too\n"
    )  # fmt: skip


def test_passes_are_those_that_training_has_unless_others_are_asked_for():
    ways = {words: json.loads(plan("-n", "2", "--blocks", "2", "--json", *words).stdout) for words in (
        (), ("--pass", "none"), ("--pass", "recompute"))}  # fmt: skip
    assert [actual["plans"][0]["passes"] for actual in ways.values()] == [["overlap"], [], ["recompute"]]


@pytest.mark.long
@pytest.mark.process
def test_the_best_plans_and_data_parallelism_are_measured_on_ranks_of_this_host(tmp_path):
    result = plan("digits", "-n", "2", "--measure", "1", "--json", "--report", tmp_path / "report.html")
    actual = json.loads(result.stdout)
    times = {one["plan"]: one["step_s"] for one in actual["measured"]}
    assert len(times) == 2
    assert times[actual["taken"]["plan"]] <= times["data(2)"]
    page = (tmp_path / "report.html").read_text()
    assert "Predicted and measured" in page
    assert find_html_errors(page) == []


@pytest.mark.long
def test_a_search_finds_nothing_slower_and_the_same_for_a_seed():
    listed = json.loads(plan("-n", "4", "--blocks", "4", "--json").stdout)
    actual = [
        json.loads(plan("-n", "4", "--blocks", "4", "--json", "--search", "--seed", "3").stdout) for _ in range(2)
    ]
    assert actual[0] == actual[1]
    assert len(actual[0]["plans"]) >= len(listed["plans"])
    names = [(one["plan"], one["num_microbatches"], *one["passes"]) for one in actual[0]["plans"]]
    assert len(names) == len(set(names)), "every plan stands once"


def test_a_budget_that_is_no_time_is_refused():
    result = plan("-n", "2", "--blocks", "2", "--search", "--time-budget", "soon")
    assert result.output == "PlanError: --time-budget soon is not a time; give seconds, as 10s\n"


def test_a_time_budget_ends_the_list_too_and_plans_that_were_not_evaluated_are_reported():
    words = ("-n", "8", "--blocks", "8", "--time-budget", "0.0s")
    listing, actual = plan(*words), json.loads(plan(*words, "--json").stdout)
    assert "the time budget ended before " in listing.output
    assert " more plans of the list were evaluated; a larger --time-budget evaluates all of them" in listing.output
    assert actual["plans"]
    assert len(actual["unseen"]) > len(actual["plans"])


def test_a_cluster_file_says_where_the_plans_would_run(tmp_path):
    file = tmp_path / "cluster.yaml"
    slow, fast = (replace(Cluster(), link=Link(1e-3, rate)) for rate in (1e6, 1e12))
    file.write_text(format_cluster(slow), encoding="utf-8")
    words = ("-n", "2", "--blocks", "2", "--json", "--cluster", str(file))
    before = json.loads(plan(*words).output)["plans"][0]["communication_s"]
    file.write_text(format_cluster(fast), encoding="utf-8")
    assert 0 <= json.loads(plan(*words).output)["plans"][0]["communication_s"] < before


def test_ranks_that_a_cluster_has_not_are_refused(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(format_cluster(Cluster(levels=(Level("host", 2, Link()),))), encoding="utf-8")
    assert plan("-n", "2", "--blocks", "2", "--cluster", str(file)).exit_code == 0
    result = plan("-n", "3", "--blocks", "2", "--cluster", str(file))
    assert result.output.startswith("PlanError: 3 ranks do not fit into a cluster of 2 (host=2); take as many ranks")


def timing_in(folder, width):
    """The file of a timing of three blocks, of which the last one takes as long as both others."""
    path = folder / "timing.json"
    timing = build_profile(
        build_equal_blocks(3, width),
        [layer_profile(1.0, 2.0), layer_profile(1.0, 2.0), layer_profile(2.0, 4.0)],
        samples=4,
    )
    path.write_text(format_profile(timing))
    return path


def test_plans_are_predicted_by_the_seconds_of_a_timing(tmp_path):
    words = ("-n", 1, "--blocks", 3, "--width", 8, "--batch-size", 4, "--json")
    listing = json.loads(plan(*words, "--profile", timing_in(tmp_path, 8)).output)
    assert listing["plans"][0]["compute_s"] == 12.0


@pytest.mark.parametrize("words", [(), ("--search", "--time-budget", "0s")])
def test_a_timing_of_another_model_is_refused_before_plans_are_ranked(tmp_path, words):
    done = plan("-n", 2, "--blocks", 3, "--width", 16, "--profile", timing_in(tmp_path, 8), *words)
    assert done.exit_code == 1
    assert done.output.startswith("PlanError: the profile is of Chain, but this is another model")


def test_a_profile_is_planned_for_and_the_stages_of_its_best_pipeline_are_named():
    result = plan("--graph", str(PROFILES / "vgg16.txt"), "-n", "2", "--batch-size", "4")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].endswith(f"for -n 2, 4 minibatches of {PROFILES / 'vgg16.txt'} in a step")
    assert any(row.startswith("data(2) ") for row in rows_of(result))
    assert any(line.startswith("  stage 0 on rank 0: node2 Conv2d(3, 64, ") for line in lines)


def test_a_missing_profile_or_one_given_with_a_job_is_refused():
    for words, message in (
        (["--graph", "missing.txt"], "missing.txt cannot be read: No such file or directory; give a graph.txt"),
        (["digits", "--graph", "graph.txt"], "graph.txt has layers of its own; omit digits"),
    ):
        result = plan(*words, "-n", "2")
        assert result.exit_code == 1
        assert message in result.output


def test_a_plan_is_written_with_its_timing_and_predicted_alike_where_it_is_read_again(tmp_path):
    words = ("-n", 2, "--blocks", 3, "--width", 8, "--batch-size", 8, "--json")
    first = json.loads(plan(*words, "--profile", timing_in(tmp_path, 8), "--out", tmp_path / "plan.yaml").stdout)
    assert (tmp_path / "plan.profile.json").read_text() == (tmp_path / "timing.json").read_text()
    assert json.loads(plan(*words, "--plan", tmp_path / "plan.yaml").stdout)["plans"] == first["plans"]
    other = plan("-n", 2, "--blocks", 3, "--width", 4, "--plan", tmp_path / "plan.yaml")
    assert f"{tmp_path}/plan.yaml:7: the profile is of Chain, but this is another model" in other.output


def test_an_edited_plan_is_ranked_with_the_others(tmp_path):
    edited = Plan.parse("pipeline(2, balance=(1,2))", num_microbatches=2)
    (tmp_path / "plan.yaml").write_text(edited.to_yaml(), encoding="utf-8")
    actual = json.loads(plan("-n", 2, "--blocks", 3, "--plan", tmp_path / "plan.yaml", "--json").stdout)
    assert {"plan": str(edited), "num_microbatches": 2, "passes": []} in [
        {name: one[name] for name in ("plan", "num_microbatches", "passes")} for one in actual["plans"]
    ]


def test_plans_are_compared_in_the_precision_of_the_option_which_the_written_plan_has(tmp_path):
    wide, narrow = (
        json.loads(plan("-n", "2", "--blocks", "2", "--batch-size", "2", "--json", *options).stdout)["plans"]
        for options in ((), ("--precision", "bf16"))
    )
    sent = [{one["plan"]: one["sent_bytes"] for one in plans} for plans in (wide, narrow)]
    assert sent[1]["zero(2, level=3)"] * 3 == sent[0]["zero(2, level=3)"] * 2
    assert sent[1]["data(2)"] == sent[0]["data(2)"]
    shown = plan("-n", "2", "--blocks", "2", "--precision", "bf16", "--out", tmp_path / "plan.yaml")
    assert "in a step, computed in bf16; predicted" in shown.output
    assert str(Plan.from_file(tmp_path / "plan.yaml").precision) == "bf16"


def test_a_plan_file_of_another_precision_is_not_compared(tmp_path):
    (tmp_path / "plan.yaml").write_text("plan:\n  strategy: data(2)\n  precision: fp16\n")
    result = plan("-n", "2", "--blocks", "2", "--precision", "bf16", "--plan", tmp_path / "plan.yaml")
    assert result.exit_code == 1
    assert "precision=bf16 was given, but the plan has precision fp16" in " ".join(result.output.split())
