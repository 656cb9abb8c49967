"""``counterpoint profile``: a table of layers, and files that other commands read."""

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.model.model_profile import parse_profile
from counterpoint.planner.pipeline.layer_graph import parse_graph


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lambda *words: CliRunner().invoke(build_app(["profile"]), ["profile", "digits", *words])


def test_the_table_has_a_row_for_every_layer(profile):
    lines = profile("--samples", "2", "--roofline").output.splitlines()
    assert lines[0] == "SmallCNN on counted, not run; microbatches of 2"
    assert lines[2].split() == ["layer", "forward", "ms", "backward", "ms", "output", "saved", "parameters"]
    assert [line.split()[0] for line in lines[3:9]] == ["0", "1", "3", "4", "8", "10"]


def test_profiles_are_cached_and_written_to_files(profile, tmp_path):
    first = profile("--samples", "4", "--out", str(tmp_path / "profile.json"))
    again = profile("--samples", "4", "--json")
    assert first.output.splitlines()[0].endswith("measured with 1 thread; microbatches of 4")
    assert parse_profile(again.output) == parse_profile((tmp_path / "profile.json").read_text())


def test_a_profile_is_written_as_pipedream_reads_it(profile, tmp_path):
    profile("--samples", "4", "--roofline", "--graph", str(tmp_path / "graph.txt"))
    result = parse_graph((tmp_path / "graph.txt").read_text())
    assert [layer.description for layer in result.nodes] == ["0", "1", "3", "4", "8", "10"]
    assert result.edges[0] == ("node1", "node2")
    assert result.nodes[0].activation_bytes == 4 * 4 * 16 * 64


def test_a_file_holds_one_profile(profile, tmp_path):
    done = profile("--threads", "1", "--threads", "2", "--out", str(tmp_path / "profile.json"))
    assert done.exit_code == 1
    assert "--threads was given 2 times, but a file holds one profile" in done.output
