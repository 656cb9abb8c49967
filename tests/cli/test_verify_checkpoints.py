"""`counterpoint verify FOLDER`: each checkpoint is intact, or damaged with the reason, and the newest intact one is named."""

import re

from typer.testing import CliRunner

from counterpoint.checkpoint import save
from counterpoint.cli.main import build_app
from tests.checkpoint.hostile_files import SHARD, forge, replace_by_pipe
from tests.checkpoint.saved_states import save_step
from tests.training.trainers import fit


def verify(folder):
    result = CliRunner().invoke(build_app(["verify"]), ["verify", str(folder)])
    return result.exit_code, re.sub(r", [\d.]+ (B|KiB)", ", SIZE", result.output)


def test_all_checkpoints_of_a_run_are_intact(tmp_path):
    fit("data(2)", fit_options={"run_dir": tmp_path, "save_every": 2})
    code, output = verify(tmp_path)
    assert (code, output.splitlines()[-1]) == (0, "0 of 2 checkpoints damaged; the newest intact one is step-00000004")
    assert verify(tmp_path / "checkpoints") == (code, output)
    assert output.startswith("step-00000002: intact, SIZE\nstep-00000004: intact, SIZE\n")
    assert verify(tmp_path / "checkpoints" / "step-00000002")[1].endswith(
        "0 of 1 checkpoint damaged; the newest intact one is step-00000002\n"
    )


def test_each_damaged_one_is_listed_with_the_reasons(tmp_path):
    for step in (1, 2, 3, 4):
        save_step(tmp_path, step)
    replace_by_pipe(tmp_path / "step-00000001" / SHARD)
    forge(tmp_path / "step-00000003", lambda content: content.update(version=3))
    shard = tmp_path / "step-00000004" / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    (tmp_path / "step-00000004" / "extra").touch()
    code, output = verify(tmp_path)
    lines = output.splitlines()
    assert code == 1
    assert [line for line in lines if line.startswith("step")] == [
        "step-00000001: damaged, SIZE", "step-00000002: intact, SIZE", "step-00000003: damaged",
        "step-00000004: damaged, SIZE",
    ]  # fmt: skip
    assert "  step-00000003/manifest.json has format version 3, this Counterpoint reads 1 and 2; install the" in output
    assert "is damaged: tensor 'fc.bias': crc32 expected " in lines[-3]
    assert lines[-2:] == [
        "  step-00000004/extra is not part of it",
        "3 of 4 checkpoints damaged; the newest intact one is step-00000002",
    ]


def test_a_wrong_state_is_damage_and_no_intact_one_is_said(tmp_path):
    fit("solo", fit_options={"checkpoint_dir": tmp_path})
    forge(tmp_path / "step-00000004", lambda content: content["state"].update(step="x"))
    code, output = verify(tmp_path)
    assert code == 1
    assert "  step-00000004/manifest.json: state.step is 'x', but must be a whole number, 0 or more; it was" in output
    assert output.endswith("1 of 1 checkpoint damaged; none is intact: restore one from a backup\n")


def test_a_folder_without_checkpoints_is_refused(tmp_path):
    code, output = verify(tmp_path)
    assert (code, "has no checkpoints; give a run's folder, or a folder with step-" in output) == (1, True)
    save(tmp_path, 1, {}, {"of": "another program"})
    assert verify(tmp_path)[0] == 0
