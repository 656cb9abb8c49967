"""Check whether this machine supports the lab, by trying each operation once in temporary namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from benchmarks.lab.host import NAMESPACES

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
STEPS = {
    "mount in a namespace": "mount -t tmpfs tmpfs /dev/shm",
    "set a host name in a namespace": "hostname lab",
    "make a bridge": "ip link add bridge type bridge",
    "make a veth pair": "ip link add one type veth peer name other",
    "shape a link with tbf": "tc qdisc add dev one root tbf rate 1mbit burst 16384 latency 50ms",
}
TRIAL_S = 20


@cache
def unavailable_reason() -> str | None:
    """Return why hosts cannot be created here, or None."""
    if sys.platform != "linux":
        return f"hosts are Linux namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"it needs root, and this process has user id {os.geteuid()}; run it as root, all rights included"
    if missing := sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None}):
        return f"tools are missing; `apt-get install {' '.join(missing)}`"
    lines = [f'{step} || {{ echo "cannot {what}" >&2; exit 1; }}' for what, step in STEPS.items()]
    return _try_command("sh", "-c", "\n".join(lines))


@cache
def faults_unavailable_reason() -> str | None:
    """Return why packets cannot be lost, cut or redirected here, or None."""
    script = str(Path(__file__).with_name("packet_rules.py"))
    wanted = '{"drop": [["10.77.0.1", 0.5]], "redirect": {"port": 1, "mark": 1, "targets": ["10.77.0.1"]}}'
    return _try_command(sys.executable, "-I", "-S", script, text=wanted)


def _try_command(*command: str, text: str = "") -> str | None:
    tried = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", *command]
    try:
        ended = subprocess.run(tried, input=text, text=True, capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the machine did not answer within {TRIAL_S} s to {' '.join(tried[:-1])}"
    if ended.returncode == 0:
        return None
    return " ".join(ended.stderr.split()) or f"{tried[0]} ended with {ended.returncode}"
