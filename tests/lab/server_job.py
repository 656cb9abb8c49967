"""A job with parameter servers on several hosts, every process started by command."""

import sys
from pathlib import Path

from benchmarks.lab import Lab, RunningCommand
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process import JobEndpoint, write_job_file
from counterpoint.rpc.address import TcpAddress
from counterpoint.rpc.job_key import new_key, write_key

PORT = 4000
READY_S = 60.0
HELLO_BYTES, PROOF_BYTES = 40, 32


class FarJob:
    """What every host needs to know is in files, which all hosts share, as one would have copied them."""

    def __init__(self, lab: Lab, folder: Path, job: JobConfig) -> None:
        self.lab, self.folder = lab, folder
        self.path, self.key_path = folder / "job.json", folder / "job.key"
        write_job_file(JobEndpoint(job, TcpAddress(lab.addresses["h0"], PORT)), self.path)
        write_key(new_key(), self.key_path)
        self.running: dict[str, RunningCommand] = {}

    def serve(self, host: str, role: str, *words: str, name: str = "") -> None:
        """A coordinator or a server listens on a host."""
        server = ("--name", name, "--listen", f"tcp:{host}:0") if name else ()
        arguments = ("--job", str(self.path), "--key-file", str(self.key_path), *server, *words)
        self.running[name or role] = self.lab.start(host, [*COUNTERPOINT, "serve", role, *arguments])

    def wait_for_servers(self) -> None:
        for name, one in self.running.items():
            one.wait_for(f"{name} of", READY_S)

    def begin(self, *words: str) -> None:
        """The coordinator on h0, and servers on the hosts after it."""
        self.serve("h0", "coordinator", "--folder", str(self.folder / "run"))
        self.serve("h1", "server", *words, name="server-0")
        self.serve("h2", "server", *words, name="server-1")
        self.wait_for_servers()

    def work(self, host: str, name: str, *, key: Path | None = None, gate: Path | None = None) -> RunningCommand:
        """A worker begins; it trains once the gate is there, if one is given."""
        command = [sys.executable, "-m", "tests.lab.ps_worker", str(self.path), str(key or self.key_path), name]
        return self.lab.start(host, [*command, *([] if gate is None else [str(gate)])])

    def kill(self) -> None:
        for one in self.running.values():
            one.kill()
        self.running.clear()


COUNTERPOINT = (sys.executable, "-m", "counterpoint")


def says_nothing_but_the_greeting(answers: dict[str, str]) -> bool:
    """Whether a port has answered what begins as a greeting, with nothing but its own, and nothing else at all."""
    replies = {name: bytes.fromhex(answer) for name, answer in answers.items()}
    return all(
        answer[:8] == b"CPWS\1\1\0\0"
        and len(answer) == HELLO_BYTES + PROOF_BYTES * ("proof" in name)
        and not any(answer[HELLO_BYTES:])
        if name.startswith("a greeting")
        else not answer
        for name, answer in replies.items()
    )
