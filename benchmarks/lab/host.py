"""One host: a process with its own namespaces, and the commands that run inside them.

A host has no name outside itself: no ``ip netns`` entry, no file, no interface. Its keeper process reads a pipe whose
other end is open only in the lab's process. When that process exits in any way, the keeper reads the end of the pipe
and exits; it is process 1 of its pid namespace, so the kernel then kills everything on the host and frees its network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")

#: What process 1 of a host does: $1 is its name, $2 the hosts file. An ignored SIGCHLD makes the kernel reap orphans.
KEEPER = """
set -e
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
printf '%s' "$2" > /dev/shm/hosts
: > /dev/shm/resolv.conf
mount --bind /dev/shm/hosts /etc/hosts
mount --bind /dev/shm/resolv.conf /etc/resolv.conf
rm /dev/shm/hosts /dev/shm/resolv.conf
hostname "$1"
ip link set lo up
for kind in all default; do echo 1 > /proc/sys/net/ipv6/conf/$kind/disable_ipv6 || true; done
trap '' CHLD
echo ready
exec cat > /dev/null
"""

READY_S = 10.0
CLOSED_S = 10.0


class LabError(Exception):
    """The lab could not be built, or a command in it failed."""


@dataclass(frozen=True, slots=True)
class LabHost:
    """A running host.

    Args:
        name: host name.
        pid: process 1 of the host, in the machine's pid namespace.
        keeper: the ``unshare`` process above process 1; its standard input is the pipe that keeps the host alive.
    """

    name: str
    pid: int
    keeper: subprocess.Popen[bytes]

    def command_inside(self, command: Sequence[str]) -> list[str]:
        """Return the command line that runs ``command`` on this host, in the caller's working directory."""
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, "--", "env", "-C", str(Path.cwd()), *command]

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host, in a new session; ``environ`` adds to the lab's own variables."""
        variables = {**os.environ, **(environ or {})}
        return subprocess.Popen(
            self.command_inside(command),
            env=variables,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def call(self, *command: str, text: str = "") -> str:
        """Run a short command on this host and return its output.

        Raises:
            LabError: it failed, or took more than 10 s.
        """
        return call(*self.command_inside(command), text=text)

    def call_in_network(self, *command: str) -> str:
        """Run a command only in this host's network, where it can name other hosts' processes.

        Raises:
            LabError: it failed, or took more than 10 s.
        """
        return call("nsenter", f"--target={self.pid}", "--net", "--", *command)

    def close(self) -> None:
        """Stop the host and every process on it."""
        if self.keeper.stdin is not None:
            self.keeper.stdin.close()
        try:
            self.keeper.wait(CLOSED_S)
        except subprocess.TimeoutExpired:
            self.keeper.kill()  # --kill-child: process 1 goes too
            self.keeper.wait()
        if self.keeper.stdout is not None:
            self.keeper.stdout.close()


def open_host(name: str, hosts_file: str) -> LabHost:
    """Start a host with only a loopback interface.

    Args:
        name: its host name; also the last word of its keeper's command line, after the lab's pid.
        hosts_file: its /etc/hosts. Its /etc/resolv.conf is empty, its /dev/shm separate.

    Raises:
        LabError: the keeper did not start; the message is its output.
    """
    marks = (name, hosts_file, f"counterpoint-lab:{os.getpid()}:{name}")
    keeper = subprocess.Popen(
        ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", KEEPER, "keeper", *marks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert keeper.stdout is not None
    said: list[bytes] = []
    while (line := keeper.stdout.readline()) and line != b"ready\n":
        said.append(line)
    if not line:
        keeper.wait()
        keeper.stdout.close()
        raise LabError(f"host {name} did not come up: {b' '.join(said).decode(errors='replace').strip()}")
    return LabHost(name, _child_of(keeper.pid), keeper)


def call(*command: str, text: str = "") -> str:
    """Run a short command on the machine and return its output.

    Raises:
        LabError: it failed, is not installed, or took more than 10 s.
    """
    if shutil.which(command[0]) is None:
        raise LabError(f"{command[0]} is not installed; `apt-get install iproute2 util-linux`")
    try:
        ended = subprocess.run(command, input=text.encode(), capture_output=True, timeout=READY_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise LabError(f"{' '.join(command)} did not end within {READY_S:.0f} s") from late
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        raise LabError(f"{' '.join(command)} ended with {ended.returncode}: {said}")
    return ended.stdout.decode(errors="replace")


def _child_of(pid: int) -> int:
    until = time.perf_counter() + READY_S
    while time.perf_counter() < until:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            return int(children[0])
    raise LabError(f"the keeper {pid} has no child; its host is gone")
