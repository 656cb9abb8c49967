"""A path that a command cannot read or write is named in one line, before anything is computed."""

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from tests.other_user import STRANGER, as_root, as_user

LONG = "a" * 300
READERS = {
    "verify": ["verify"],
    "export": ["export"],
    "train --resume": ["train", "digits", "--resume"],
    "train --config": ["train", "--config"],
    "train --folder": ["train", "digits", "--epochs", "1", "--folder"],
    "plan --cluster": ["plan", "-n", "2", "--blocks", "2", "--cluster"],
    "plan --profile": ["plan", "-n", "2", "--blocks", "2", "--profile"],
    "plan --graph": ["plan", "-n", "2", "--graph"],
    "train --plan": ["train", "digits", "--plan"],
    "serve --job": ["serve", "coordinator", "--job"],
}
WRITERS = {
    "show --svg": ["show", "data(2)", "--svg"],
    "plan --out": ["plan", "-n", "2", "--blocks", "2", "--out"],
    "plan --report": ["plan", "-n", "2", "--blocks", "2", "--report"],
    "probe --out": ["probe", "-n", "2", "--out"],
    "profile --out": ["profile", "digits", "--out"],
    "profile --graph": ["profile", "digits", "--graph"],
    "bench --json": ["bench", "wire", "--json"],
    "key": ["key"],
}


def run(*words):
    return CliRunner().invoke(build_app([words[0]]), [str(word) for word in words])


def require_one_line(result):
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    first, *rest = result.output.splitlines()
    assert first.split(": ")[0] in {"PlanError", "CheckpointError", "LaunchError"}
    assert not rest


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("path", [LONG, "loop"])
def test_a_path_that_leads_nowhere_is_named(name, path, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    require_one_line(run(*READERS[name], tmp_path / path))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("path", [LONG, "no/file", "."])
def test_a_file_that_cannot_be_written_is_known_before_anything_is_computed(name, path, tmp_path):
    require_one_line(run(*WRITERS[name], tmp_path / path))


@as_root
@pytest.mark.parametrize("name", ["verify", "export", "train --resume", "train --config"])
def test_a_folder_that_this_user_may_not_enter_is_named(name, tmp_path):
    run(*READERS[name], tmp_path)  # imports what another user may not read
    (tmp_path / "a").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    with as_user(STRANGER):
        result = run(*READERS[name], tmp_path / "a" / "b")
    require_one_line(result)
    assert "Permission denied" in result.output
