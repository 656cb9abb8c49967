"""``counterpoint probe``: its file can be used for planning."""

import json

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.world.cluster_file import load_cluster, parse_cluster


def run(*words):
    return CliRunner().invoke(build_app([words[0]]), list(words))


@pytest.mark.process
@pytest.mark.slow
def test_ranks_of_this_host_write_a_cluster_that_can_be_planned_with(tmp_path):
    out = tmp_path / "cluster.yaml"
    result = run("probe", "-n", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"cluster file: {out}\n")
    assert any(line.split()[:2] == ["size", "host"] for line in result.output.splitlines())
    cluster = load_cluster(out)
    assert [(level.name, level.count) for level in cluster.levels] == [("host", 2)]
    assert run("plan", "-n", "2", "--blocks", "2", "--cluster", str(out)).exit_code == 0


@pytest.mark.long
def test_one_rank_is_measured_here_and_all_figures_are_json():
    actual = json.loads(run("probe", "-n", "1", "--json").output)
    assert (actual["num_ranks"], actual["links"]) == (1, [])
    assert {one["size"] for one in actual["matmuls"]} == {256, 512, 1024}
    assert parse_cluster(actual["cluster"]).device.memory_bytes > 0


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    result = run("probe", "-n", "2", "--out", str(tmp_path / "no" / "cluster.yaml"))
    assert result.exit_code == 1
    assert result.output.startswith("PlanError: there is no folder ")


def test_under_a_launcher_its_ranks_are_measured_and_no_others(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    result = run("probe", "-n", "3")
    assert result.output.startswith("LaunchError: a launcher has started 2 ranks with their own number of threads")
