"""``counterpoint plan`` for hosts with GPUs that are not there."""

import json

from typer.testing import CliRunner

from counterpoint.cli.main import build_app

SCRIPT = """
import torch
import counterpoint as cp

with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters())
loss = torch.nn.functional.cross_entropy
with cp.parallelize(model, optimizer, loss, strategy="solo", device="cuda", precision="bf16") as step:
    step(torch.zeros(32, 64), torch.zeros(32, dtype=torch.int64))
"""
EQUAL_BLOCKS = ("-n", 8, "--blocks", 4, "--width", 4096, "--batch-size", 4096)


def plan(*words):
    return CliRunner().invoke(build_app(["plan"]), ["plan", *map(str, words)])


def test_the_table_says_that_times_come_from_a_roofline(golden):
    golden("plan-8xh100.txt", plan(*EQUAL_BLOCKS, "--cluster", "8xh100", "--precision", "bf16", "--top", 4).output)


def test_a_narrower_dtype_and_a_newer_card_are_faster():
    steps = []
    for cluster, precision in (("8xa100-80gb", "fp32"), ("8xa100-80gb", "bf16"), ("8xh100", "bf16")):
        shown = plan(*EQUAL_BLOCKS, "--cluster", cluster, "--precision", precision, "--json")
        steps.append(json.loads(shown.output)["plans"][0]["step_s"])
    assert steps[0] > steps[1] > steps[2]


def test_a_script_for_a_gpu_that_is_not_there_is_planned_without_values(tmp_path):
    """Its device was asked for, and a model on ``meta`` refused, although nothing was to be computed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    shown = plan(script, "-n", 8, "--cluster", "8xH200", "--json")
    assert json.loads(shown.output)["roofline"] == "NVIDIA H200 SXM 141GB"


def test_a_wrong_name_is_answered_with_the_nearest():
    shown = plan(*EQUAL_BLOCKS, "--cluster", "8xh10")
    assert shown.exit_code == 1
    assert "there is no cluster 8xh10, and no file of this name; did you mean 8xh100?" in shown.output


def test_a_model_that_is_too_large_is_told_what_is_reserved():
    shown = plan("-n", 8, "--blocks", 8, "--width", 131072, "--cluster", "8xa100-40gb", "--top", 1).output
    assert "of 38654705664 bytes (and 4294967296 more that are reserved) on the rank with most" in " ".join(
        shown.split()
    )
