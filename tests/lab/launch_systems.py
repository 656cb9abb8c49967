"""Helpers of the tests of other systems' launchers: a script, its single-process losses, and a two-node Slurm."""

import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from getpass import getuser
from importlib.util import find_spec
from pathlib import Path

from tests.process.test_faults import variables
from tests.process.test_launchers import SCRIPT, losses_of

EXTRAS = {"ray": "ray", "mpi4py": "mpi"}
SLURM_PARTS = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
AS_ROOT["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # more ranks than cores
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
CONF = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
PluginDir={plugins}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_no(module):
    """Why a test that needs a module is skipped; empty where it is installed."""
    return "" if find_spec(module) else f"{module} is not installed: pip install 'counterpoint[{EXTRAS[module]}]'"


def why_no_mpirun():
    return "" if shutil.which("mpirun") else "there is no mpirun: apt-get install openmpi-bin"


def why_no_slurm():
    missing = [part for part in SLURM_PARTS if slurm_part(part) is None]
    rest = "unpack Debian's packages of Slurm and name the folder: SLURM_UNPACKED"
    return f"there is no {', '.join(missing)}: {rest}" if missing else ""


def slurm_part(name):
    """Where a program of Slurm is: installed, or in Debian's packages unpacked below SLURM_UNPACKED."""
    root = Path(os.environ.get("SLURM_UNPACKED", "/nowhere"))
    places = [root / "usr" / folder / (name + ending) for folder in ("bin", "sbin") for ending in ("", "-wlm")]
    return next((str(place) for place in places if place.is_file()), shutil.which(name))


def losses_alone(folder):
    """The losses of the script as `python script` writes them, but torch is loaded already."""
    (folder / "python").mkdir()
    before, sys.argv = sys.argv, [str(folder / "train.py"), str(folder / "python")]
    try:
        runpy.run_path(str(script_in(folder)), run_name="__main__")
    finally:
        sys.argv = before
    return losses_of(folder / "python")[0]


def script_in(folder):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


def started(words, more, deadline_s=120.0):
    """How a command of counterpoint has ended."""
    command = [sys.executable, "-m", "counterpoint", *map(str, words)]
    return subprocess.run(
        command, env={**variables(), **more}, capture_output=True, text=True, timeout=deadline_s, check=False
    )


class Slurm:
    """A Slurm of two nodes, all of it processes of this host, without systemd and munge; a context manager."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "state").mkdir()
        libraries = Path(slurm_part("slurmctld")).parents[1] / "lib" / f"{os.uname().machine}-linux-gnu"
        plugins = libraries / "slurm-wlm"
        (folder / "slurm.conf").write_text(
            CONF.format(folder=folder, host=socket.gethostname(), ports=free_ports(3), plugins=plugins, user=getuser())
        )
        bin_folder = str(Path(slurm_part("sbatch")).parent)
        self.variables = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": f"{plugins}:{libraries}",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        }
        self._daemons = []

    def __enter__(self):
        self._start(slurm_part("slurmctld"), "-i", "-D")
        for node in ("n1", "n2"):
            (self.folder / node).mkdir()
            self._start(slurm_part("slurmd"), "-D", "-N", node, "-d", slurm_part("slurmstepd"))
        end = time.monotonic() + 30
        while "2 idle" not in self.said("sinfo", "-h", "-o", "%D %t"):
            assert time.monotonic() < end, self.said("sinfo")
            threading.Event().wait(0.2)
        return self

    def __exit__(self, *_):
        for daemon in reversed(self._daemons):
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    def said(self, *words):
        command = [slurm_part(words[0]), *words[1:]]
        return subprocess.run(
            command, env={**os.environ, **self.variables}, capture_output=True, text=True, timeout=20, check=False
        ).stdout

    def _start(self, *words):
        with (self.folder / f"{Path(words[0]).name}.out").open("a") as out:
            self._daemons.append(
                subprocess.Popen(
                    words, env={**os.environ, **self.variables}, stdout=out, stderr=out, start_new_session=True
                )
            )


def free_ports(number):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports
