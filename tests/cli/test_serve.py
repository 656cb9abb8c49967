"""``counterpoint serve``: invalid options are refused before anything listens."""

import pytest
from typer.testing import CliRunner

from counterpoint.cli.main import build_app
from counterpoint.ps.consistency import Asp
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.job_file import JobEndpoint, write_job_file
from counterpoint.rpc.address import parse_address
from counterpoint.rpc.job_key import new_key, read_key, write_key


@pytest.fixture
def serve(tmp_path):
    """Return ``serve(*words)``, which returns what a command says for a job with a key."""
    write_job_file(JobEndpoint(JobConfig("tour", Asp(), 2), parse_address("tcp:0.0.0.0:0")), tmp_path / "job.json")
    write_key(new_key(), tmp_path / "key")

    def run(*words):
        message = [*words, "--job", str(tmp_path / "job.json"), "--key-file", str(tmp_path / "key")]
        return CliRunner().invoke(build_app(["serve", *message]), ["serve", *message]).output

    return run


REFUSED = [
    (("coordinator",), "tcp:0.0.0.0:0 is a wildcard address, to which others cannot connect"),
    (("coordinator", "--name", "first"), "a coordinator has no --name, and listens at the address in "),
    (("server", "--name", "server-0"), "a server needs --name and --listen, as --name server-0 --listen"),
    (
        ("server", "--name", "server-0", "--listen", "tcp:0.0.0.0:0"),
        "give the address of one interface, such as tcp:10.0.0.1:4000",
    ),
    (("server", "--name", "server-0", "--listen", "10.0.0.2"), "is not an address; write unix:NAME or tcp:"),
    (("coordinator", "--key-fd", "0"), "--key-file and --key-fd are both given"),
    (("resume",), "resume needs --folder"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_invalid_arguments_are_refused_with_a_remedy(serve, words, message):
    output = serve(*words)
    assert output.startswith("LaunchError: ")
    assert message in output


def test_without_a_key_neither_coordinator_nor_server_listens_on_loopback(tmp_path):
    """Another user of the host joined such a job, and wrote weights."""
    path = tmp_path / "job.json"
    write_job_file(JobEndpoint(JobConfig("tour", Asp(), 1), parse_address("tcp:127.0.0.1:0")), path)
    for words in (("coordinator",), ("server", "--name", "server-0", "--listen", "tcp:127.0.0.1:0")):
        arguments = ["serve", *words, "--job", str(path)]
        output = CliRunner().invoke(build_app(arguments), arguments).output
        assert output.startswith("LaunchError: there is no job key for tcp:127.0.0.1:0, ")
        assert "make a key with `counterpoint key job.key` and give --key-file job.key, or use unix:NAME" in output


def test_one_command_makes_a_key_that_only_its_owner_reads(tmp_path):
    path = tmp_path / "job.key"
    outputs = [CliRunner().invoke(build_app(["key", str(path)]), ["key", str(path)]).output for _ in range(2)]
    assert outputs[0] == f"wrote a new key to {path}\n"
    assert outputs[1].startswith(f"LaunchError: cannot write a job key to {path}: file exists")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path).secret.hex() not in "".join(outputs)


def test_a_job_without_a_cut_cannot_be_gone_on_from(serve, tmp_path):
    output = serve("resume", "--folder", str(tmp_path))
    assert output.startswith(f"CheckpointError: there is no complete snapshot in {tmp_path}")
