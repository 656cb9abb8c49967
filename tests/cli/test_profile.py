"""``counterpoint profile``: a table of layers, files that other commands read, and the gradients by power of two."""

import json

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


@pytest.mark.long
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


def test_gradients_are_written_as_json(profile):
    counted = json.loads(profile("--gradients", "--samples", "4", "--json").output)
    assert (counted["model"], counted["num_samples"], counted["dtypes"]) == ("SmallCNN", 4, ["float32"])
    totals = {row["of"]: row for row in counted["gradients"] if row["modules"] is None}
    kinds = [row for row in counted["gradients"] if row["modules"] is not None and row["of"] == "weights"]
    assert {row["modules"] for row in kinds} == {"Conv2d", "BatchNorm2d", "Linear"}
    weights = totals["weights"]
    assert weights["values"] == sum(row["values"] for row in kinds) == 38_330
    assert weights["values"] == weights["zeros"] + sum(weights["exponents"].values())
    largest = max(int(exponent) for row in totals.values() for exponent in row["exponents"])
    assert counted["loss_scale"] == 2.0 ** (14 - largest)


def test_the_table_of_gradients_adds_up_to_all_values(profile):
    lines = profile("--gradients", "--samples", "4").output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("magnitude"))
    rows = [line.split() for line in lines[start + 1 : -3]]
    shares = [float(row[-4].lstrip("<>")) for row in rows]
    assert lines[start + 1].startswith("zero ")
    assert len(rows) <= 21
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(rows))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--roofline", "--remeasure"), "it takes no --roofline or --remeasure; run the command once for each"),
        (("--threads", "2"), "--gradients counts gradients and measures no times, so it takes no --threads"),
        (
            ("--samples", "2", "--samples", "4"),
            "--samples was given 2 times, but --gradients counts those of one batch",
        ),
    ],
)
def test_options_for_times_are_refused_with_gradients(profile, words, message):
    done = profile("--gradients", *words)
    assert (done.exit_code, message in " ".join(done.output.split())) == (1, True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_measured_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["profile", "text", "--samples", "4", "--compile", "segments(backend=eager)"]
    lines = CliRunner().invoke(build_app(["profile"]), words).output.splitlines()
    start = next(
        index for index, line in enumerate(lines) if line.startswith("compile=segments(backend=eager): compil")
    )
    assert lines[start + 1].startswith("4 samples, unpartitioned: forward ")
    assert lines[start + 2].startswith("  forward and backward of 4 samples take ")


def test_counting_operations_compiles_nothing(profile):
    assert "--roofline counts operations and compiles nothing" in profile("--roofline", "--compile", "blocks").output


@pytest.mark.filterwarnings("ignore")
def test_batch_norm_is_not_compiled(profile):
    done = profile("--samples", "4", "--compile", "segments(backend=eager)")
    assert "compile= compiles batch norm as it is, but under this plan its statistics are collected" in done.output
