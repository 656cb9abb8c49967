"""The lab: hosts, their network and its faults."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.lab import availability, network
from benchmarks.lab.commands import FinishedCommand, RunningCommand, start, wait_all
from benchmarks.lab.host import LabError, LabHost, open_host
from benchmarks.lab.network import Traffic
from counterpoint.launchers.environment import RankEnvironment, rank_variables
from counterpoint.rpc.job_key import new_key, write_key

HERE = Path(__file__).parent
MASTER_PORT = 29500  # hosts have separate port spaces
PROXY_MARK = 0x6C6162
PYTHON = (sys.executable, "-I", "-S")
Link = tuple[str, str]


class Lab:
    """Hosts ``h0``, ``h1``, ... on one switch, from ``with`` to its end; nothing of them is left afterwards.

    Args:
        hosts: how many, at most 200.
        rate: of each host's link in each direction, as ``tc`` writes it; None: as fast as the machine is.
        latency_s: how long every byte takes from any host to any other; see :meth:`delay`.
        seed: of the jitter of delays.

    Raises:
        LabError: it cannot be built here; :meth:`unavailable_reason` says so beforehand.

    Example::

        with Lab(hosts=2, rate="1gbit") as lab:
            ended = lab.run_ranks([sys.executable, "train.py"], per_host=2, deadline_s=60)
            print(ended[0].text(), lab.traffic("h0").sent_bytes)
    """

    def __init__(self, hosts: int, rate: str | None = None, latency_s: float = 0.0, seed: int = 0) -> None:
        if not 1 <= hosts <= 200:
            raise LabError(f"hosts={hosts}: a lab has 1 to 200 hosts")
        if rate is not None:
            network.bytes_per_s(rate)
        self.names = tuple(f"h{index}" for index in range(hosts))
        self.addresses = {name: f"10.77.0.{index}" for index, name in enumerate(self.names, 1)}
        self._rate, self._latency_s, self._seed = rate, latency_s, seed
        self._hosts: dict[str, LabHost] = {}
        self._lost_error: dict[Link, float] = {}
        self._delays: dict[Link, tuple[float, float]] = {}
        self._proxies: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._running: list[RunningCommand] = []
        self._key_file = Path()
        self._open = contextlib.ExitStack()

    @staticmethod
    def unavailable_reason() -> str | None:
        """Return why no lab can be opened here, or None if it can."""
        return availability.unavailable_reason()

    @staticmethod
    def faults_unavailable_reason() -> str | None:
        """Return why packets cannot be lost, cut or delayed here, or None if they can."""
        return availability.unavailable_reason() or availability.faults_unavailable_reason()

    def __enter__(self) -> Self:
        if reason := availability.unavailable_reason():
            raise LabError(f"no lab can be opened here: {reason}")
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        hosts_file = "".join(f"{line}\n" for line in lines)
        with contextlib.ExitStack() as opening:
            folder = opening.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-lab-"))
            self._key_file = Path(folder, "job.key")
            write_key(new_key(), self._key_file)
            self._switch = open_host("switch", hosts_file)
            opening.callback(self._switch.close)
            for name in self.names:
                self._hosts[name] = open_host(name, hosts_file)
                opening.callback(self._hosts[name].close)
            opening.callback(self._stop_all)
            placed = {name: (host, self.addresses[name]) for name, host in self._hosts.items()}
            network.connect(self._switch, placed, self._rate)
            if self._latency_s:
                self.delay(self.names, self.names, self._latency_s)
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def start(
        self, host: str, command: Sequence[str], environ: Mapping[str, str] | None = None, name: str | None = None
    ) -> RunningCommand:
        """Start a command on a host, in the caller's working directory; closing the lab kills it."""
        running = start(self._runner(host), command, environ, name)
        self._running.append(running)
        return running

    def run(self, commands: Mapping[str, Sequence[str]], deadline_s: float = 60.0) -> dict[str, FinishedCommand]:
        """Run one command on each of some hosts, at once, and return how each ended.

        Raises:
            LabError: not all had ended after ``deadline_s``; the message names them and has their last lines.
        """
        running = [self.start(host, command) for host, command in commands.items()]
        return dict(zip(commands, self._finish(running, deadline_s), strict=True))

    def start_ranks(
        self, command: Sequence[str], place: Iterable[str], environ: Mapping[str, str] | None = None
    ) -> list[RunningCommand]:
        """Start one command on every rank, told who it is by the variables that torchrun sets, with the lab's job key.

        Args:
            command: the same for all.
            place: the host of each rank, from rank 0; that of rank 0 is the master.
            environ: more variables, the same for all.
        """
        hosts = list(place)
        job, groups = uuid.uuid4().hex, list(dict.fromkeys(hosts))
        running = []
        for rank, host in enumerate(hosts):
            told = RankEnvironment(
                rank=rank,
                world_size=len(hosts),
                local_rank=hosts[:rank].count(host),
                local_world_size=hosts.count(host),
                master_addr=hosts[0],
                master_port=MASTER_PORT,
                job=job,
                key_file=str(self._key_file),
            )
            group = {"GROUP_RANK": str(groups.index(host)), "GROUP_WORLD_SIZE": str(len(groups))}
            variables = {**rank_variables(told), **group, **(environ or {})}
            running.append(self.start(host, command, variables, f"rank {rank} on {host}"))
        return running

    def run_ranks(
        self,
        command: Sequence[str],
        per_host: int = 1,
        *,
        interleaved: bool = False,
        environ: Mapping[str, str] | None = None,
        deadline_s: float = 60.0,
    ) -> list[FinishedCommand]:
        """Run one command on ``per_host`` ranks of every host and return how each ended, from rank 0.

        Args:
            command: the same for all.
            per_host: ranks of each host.
            interleaved: neighbouring ranks are on different hosts; else they share one where they can.
            environ: more variables, the same for all.
            deadline_s: for all of them together.

        Raises:
            LabError: not all had ended after ``deadline_s``; the message names them and has their last lines.
        """
        place = [name for name in self.names for _ in range(per_host)]
        if interleaved:
            place = [name for _ in range(per_host) for name in self.names]
        return self._finish(self.start_ranks(command, place, environ), deadline_s)

    def pid(self, host: str) -> int:
        """Return process 1 of a host as the machine counts: ``nsenter --all --target PID`` looks around in it."""
        return self._runner(host).pid

    def traffic(self, host: str) -> Traffic:
        """Return what has crossed a host's link so far, without traffic between its own ranks."""
        return network.traffic(self._runner(host))

    def shape(self, host: str, rate: str) -> None:
        """Give one host's link another rate, in each direction."""
        network.shape(self._switch, self._runner(host), rate)

    def unplug(self, host: str) -> None:
        """Disable a host's link at the switch: the host sees no error."""
        self._runner(host)
        self._switch.call("ip", "link", "set", network.port(host), "down")

    def plug(self, host: str) -> None:
        """Enable an unplugged link."""
        self._runner(host)
        self._switch.call("ip", "link", "set", network.port(host), "up")

    def lose(self, source: str | Iterable[str], target: str | Iterable[str], ratio: float) -> None:
        """Lose packets from sources to targets where they come in, each by chance; 1 is a cut, 0 ends it.

        Raises:
            LabError: the ratio is not a ratio, a host is unknown, or packet rules are not possible here.
        """
        if not 0 <= ratio <= 1:
            raise LabError(f"ratio={ratio}: give a number from 0 (nothing is lost) to 1 (all is)")
        links = self._links(source, target)
        self._lost_error.update(dict.fromkeys(links, ratio))
        for host in {to for _, to in links}:
            self._set_rules(host)

    def cut(self, source: str | Iterable[str], target: str | Iterable[str]) -> None:
        """Drop all packets from sources to targets; the other direction is not affected."""
        self.lose(source, target, 1.0)

    def partition(self, one: str | Iterable[str], other: str | Iterable[str]) -> None:
        """Drop all packets between two sets of hosts."""
        self.cut(one, other)
        self.cut(other, one)

    def heal(self) -> None:
        """End all losses and cuts."""
        for host in {to for _, to in self._lost_error}:
            self._lost_error = {link: ratio for link, ratio in self._lost_error.items() if link[1] != host}
            self._set_rules(host)

    def delay(
        self, source: str | Iterable[str], target: str | Iterable[str], delay_s: float, jitter_s: float = 0.0
    ) -> None:
        """Hold every byte of TCP connections from sources to targets for a time, and up to ``jitter_s`` more.

        Connections that are opened after the first delay between two hosts follow every later change, those from
        before it follow none.

        Raises:
            LabError: a time is below 0, a host is unknown, or packet rules are not possible here.
        """
        if min(delay_s, jitter_s) < 0:
            raise LabError(f"delay_s={delay_s}, jitter_s={jitter_s}: give seconds from 0")
        links = self._links(source, target)
        self._delays.update(dict.fromkeys(links, (delay_s, jitter_s)))
        for host in {end for link in links for end in link}:
            self._set_delays(host)
            self._set_rules(host)

    def _finish(self, running: Sequence[RunningCommand], deadline_s: float) -> list[FinishedCommand]:
        try:
            return wait_all(running, deadline_s)
        finally:
            for one in running:
                one.kill()
                one.close()
                self._running.remove(one)

    def _links(self, source: str | Iterable[str], target: str | Iterable[str]) -> list[Link]:
        sources = (source,) if isinstance(source, str) else tuple(source)
        targets = (target,) if isinstance(target, str) else tuple(target)
        for host in (*sources, *targets):
            self._runner(host)
        return [(one, other) for one in sources for other in targets if one != other]

    def _runner(self, name: str) -> LabHost:
        if name not in self._hosts:
            known = ", ".join(self._hosts) or "no host, for it is not open"
            raise LabError(f"host {name!r} is not in this lab; it has {known}")
        return self._hosts[name]

    def _delayed_peers(self, host: str) -> list[str]:
        return [name for name in self.names if (host, name) in self._delays or (name, host) in self._delays]

    def _set_rules(self, host: str) -> None:
        wanted: dict[str, object] = {
            "drop": [
                (self.addresses[one], ratio) for (one, to), ratio in self._lost_error.items() if to == host and ratio
            ]
        }
        if host in self._proxies:
            targets = [self.addresses[name] for name in self._delayed_peers(host)]
            wanted["redirect"] = {"port": self._proxies[host][1], "mark": PROXY_MARK, "targets": targets}
        self._runner(host).call(*PYTHON, str(HERE / "packet_rules.py"), text=json.dumps(wanted))

    def _set_delays(self, host: str) -> None:
        if host not in self._proxies:
            script = (*PYTHON, str(HERE / "delay_proxy.py"), str(PROXY_MARK), f"{self._seed} {host}")
            proxy = self._runner(host).start(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._open_proxy(host, proxy)
        table = {
            self.addresses[name]: {
                "there": self._delays.get((host, name), (0.0, 0.0)),
                "back": self._delays.get((name, host), (0.0, 0.0)),
            }
            for name in self._delayed_peers(host)
        }
        _send_line(self._proxies[host][0], json.dumps(table))

    def _open_proxy(self, host: str, proxy: subprocess.Popen[bytes]) -> None:
        assert proxy.stdout is not None
        port = proxy.stdout.readline()
        if not port:
            raise LabError(f"the delay proxy of {host} did not start; it ended with {proxy.wait()}")
        self._proxies[host] = (proxy, int(port))

    def _stop_all(self) -> None:
        for one in self._running:
            one.kill()
            one.close()
        for proxy, _ in self._proxies.values():
            for pipe in (proxy.stdin, proxy.stdout):
                if pipe is not None:
                    pipe.close()
            proxy.wait()
        for state in (self._running, self._proxies, self._hosts, self._lost_error, self._delays):
            state.clear()


def _send_line(proxy: subprocess.Popen[bytes], line: str) -> None:
    assert proxy.stdin is not None
    assert proxy.stdout is not None
    proxy.stdin.write(line.encode() + b"\n")
    proxy.stdin.flush()
    if proxy.stdout.readline() != b"set\n":
        raise LabError(f"a delay proxy ended with {proxy.wait()} instead of taking {line}")
