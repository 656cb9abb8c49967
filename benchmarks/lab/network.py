"""The network: a switch with a bridge, one shaped link to each host, and the links' counters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.host import LabError, LabHost

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
QUEUE_S = 0.05  # a full queue holds what the link carries in this time; what is above it is dropped
BURST_S = 0.001
MIN_BURST_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """What crossed a host's link, frames with their headers; two of them subtract.

    Args:
        sent_bytes: from the host to the switch.
        received_bytes: from the switch to the host.
        sent_frames: as the interface counts; one may hold many packets, which the machine has not cut up.
        received_frames: likewise.
    """

    sent_bytes: int
    received_bytes: int
    sent_frames: int
    received_frames: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes - earlier.sent_bytes,
            self.received_bytes - earlier.received_bytes,
            self.sent_frames - earlier.sent_frames,
            self.received_frames - earlier.received_frames,
        )


def bytes_per_s(rate: str) -> float:
    """Return the bytes per second of a rate as ``tc`` writes it: ``"1gbit"`` is 125e6.

    Raises:
        LabError: the text is no such rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or not float(match[1]):
        raise LabError(f"rate {rate!r} is not a number above 0 with a unit; write 500kbit, 100mbit or 1gbit")
    return float(match[1]) * UNITS[match[2]] / 8


def connect(switch: LabHost, hosts: Mapping[str, tuple[LabHost, str]], rate: str | None) -> None:
    """Join hosts by a bridge in the switch; afterwards each has ``eth0`` with its address, shaped both ways.

    Args:
        switch: a host without a network.
        hosts: each host and its address, by name.
        rate: of every link in each direction; None leaves the links as fast as the machine is.
    """
    switch.call("ip", "link", "add", "bridge", "type", "bridge")
    switch.call("ip", "link", "set", "bridge", "up")
    for name, (host, address) in hosts.items():
        ends = (port(name), "type", "veth", "peer", "name", "eth0")
        switch.call_in_network("ip", "link", "add", *ends, "netns", str(host.pid))
        switch.call("ip", "link", "set", port(name), "master", "bridge", "up")
        host.call("ip", "address", "add", f"{address}/24", "dev", "eth0")
        host.call("ip", "link", "set", "eth0", "up")
        if rate is not None:
            shape(switch, host, rate)


def shape(switch: LabHost, host: LabHost, rate: str) -> None:
    """Make one host's link carry ``rate`` in each direction, from now on."""
    burst = max(MIN_BURST_BYTES, int(bytes_per_s(rate) * BURST_S))
    tbf = ("tbf", "rate", rate, "burst", str(burst), "latency", f"{QUEUE_S * 1e3:.0f}ms")
    host.call("tc", "qdisc", "replace", "dev", "eth0", "root", *tbf)
    switch.call("tc", "qdisc", "replace", "dev", port(host.name), "root", *tbf)


def traffic(host: LabHost) -> Traffic:
    """Return what has crossed a host's link since it was made; loopback is not in it."""
    for line in Path(f"/proc/{host.pid}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "eth0":
            counts = [int(figure) for figure in figures.split()]
            return Traffic(counts[8], counts[0], counts[9], counts[1])
    raise LabError(f"host {host.name} has no eth0; it was not connected, or has been removed")


def port(name: str) -> str:
    """Return the name of the interface in the switch that leads to a host."""
    return f"to-{name}"
