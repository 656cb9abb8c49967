"""``counterpoint launch``: a dry run shows what would run, and mistakes are found before anything has run."""

import sys

import pytest

from counterpoint.rpc.job_key import new_key, write_key
from tests.cli.test_run import command


def test_a_dry_run_shows_the_batch_script_with_this_interpreter(tmp_path):
    write_key(new_key(), key_file := tmp_path / "job.key")
    result = command("launch", "--on", "slurm", "--hosts", 2, "-n", 4, "--cpus", 2, "--dry-run",
                     "--key-file", key_file, "train.py", "--lr", 1)  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:5] == [
        "#!/bin/bash", "# counterpoint.sbatch", "#SBATCH --job-name=counterpoint", "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
    ]  # fmt: skip
    assert lines[-2].endswith(f"{sys.executable} -m counterpoint.launchers train.py --lr 1")
    assert lines[-1] == "# $ sbatch counterpoint.sbatch"


@pytest.mark.long(quick=["words0-..."])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--on", "spork", "train.py"], "LaunchError: there is no launcher 'spork'; give one of local, torchrun"),
        (["--on", "local", "nowhere.py"], "LaunchError: there is no script nowhere.py in "),
        (["--on", "kubernetes", "train.py"], "LaunchError: a pod needs an image"),
    ],
)
def test_what_cannot_be_started_is_an_error_without_traceback(words, text):
    result = command("launch", *words)
    assert (result.returncode, result.stderr[: len(text)]) == (1, text)


def test_a_rank_starts_no_ranks():
    inside = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
              "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
    result = command("launch", "--on", "local", "train.py", environment=inside)
    assert result.stderr.startswith("LaunchError: this is already rank 1 of 2; ranks do not start ranks")


def test_a_script_is_started_here_and_its_exit_code_comes_back(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:]); sys.exit(3)")
    result = command("launch", "--on", "local", "-n", 1, script, "a", "--on", "b")
    assert (result.returncode, result.stdout) == (3, "[rank 0] 1 ['a', '--on', 'b']\n")
