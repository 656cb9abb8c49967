"""A job of real processes on a bad day: servers, workers, coordinator are killed at random; others join and leave."""

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from counterpoint.launchers.local import LEASH
from counterpoint.launchers.serving import start
from counterpoint.server.actions import COORDINATOR
from counterpoint.server.job import Asp, Bsp, Budget, Job, Patience, Ssp, Work
from tests.server.hosting.program import KEY, total_of, work

PATIENCE = Patience(beat_s=0.2, silence_s=2.0, lease_s=20.0, retry_s=0.4)
PROGRAM = Path(__file__).with_name("program.py")
END_S = 110.0


def draw_job(random):
    """A small job: a way of counting, one or two servers, some data."""
    step = 4
    consistency = random.choice((Asp(), Ssp(2), Bsp(step)))
    is_bsp = isinstance(consistency, Bsp)
    work_ = Work(400, 2, 1 if is_bsp else 2, step if is_bsp else 0)
    return Job("ordeal", consistency, random.choice((1, 2)), work_, Budget(1000, 10_000), PATIENCE)


@dataclass
class Ordeal:
    """What befell a job, and what it counted in the end."""

    seed: int
    job: Job
    kills: dict[str, int] = field(default_factory=dict)
    num_joined: int = 0
    seconds: float = 0.0
    values: list[float] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    errors: list[str] = field(default_factory=list)

    @property
    def is_exact(self):
        """Whether every portion has been counted once."""
        return not self.errors and self.values == [-1.0] * total_of(self.job)


def run(seed, folder, *, num_strikes=8):
    """A job has been done to its end in spite of everything; what came out of it."""
    random = Random(seed)
    found = Ordeal(seed, draw_job(random))
    began = time.monotonic()
    spares = 1 if found.job.num_servers > 1 else 0
    with ExitStack() as stack:
        servers = stack.enter_context(start(found.job, folder=folder, spares=spares, is_journaled=True))
        observer = stack.enter_context(servers.join("observer"))
        fate = Fate(found, servers, observer, random)
        stack.callback(fate.close)
        for _ in range(2):
            fate.add_worker()
        pause = threading.Event()
        for _ in range(num_strikes):
            if not fate.is_over:
                pause.wait(2 * random.random())
                fate.strike()
        while not fate.is_over and time.monotonic() - began < END_S:
            pause.wait(0.1)
            if not fate.workers:
                fate.add_worker()
        work(observer)
        pulled = observer.pull(KEY).wait()
        found.values, found.versions = pulled.values.tolist(), pulled.versions
    found.seconds = time.monotonic() - began
    return found


class Fate:
    """Kills processes and starts workers."""

    def __init__(self, ordeal, servers, observer, random):
        self.ordeal, self.servers, self.observer, self.random = ordeal, servers, observer, random
        self.workers = {}
        self.lasting = set()
        self.is_done = False
        self.killed = {}

    def add_worker(self):
        """One more worker begins; it may leave of its own will after some tasks."""
        self.ordeal.num_joined += 1
        name = f"worker-{self.ordeal.num_joined}"
        num_tasks = self.random.choice((0, 0, 20))
        self.lasting |= {name} if not num_tasks else set()
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), ""]
        program = [sys.executable, str(PROGRAM), str(self.servers.contact_path), name, str(num_tasks)]
        self.workers[name] = subprocess.Popen([*leash, *program], stderr=subprocess.PIPE, start_new_session=True)

    @property
    def is_over(self):
        """Whether a worker has found that all is done, or something has gone wrong."""
        for name, popen in list(self.workers.items()):
            if popen.poll() is None:
                continue
            if popen.returncode > 0:
                self.ordeal.errors.append(popen.stderr.read().decode()[-2000:])
            self.is_done = self.is_done or (popen.returncode == 0 and name in self.lasting)
            del self.workers[name]
            popen.stderr.close()
        return bool(self.ordeal.errors) or self.is_done

    def strike(self):
        """Somebody is killed, or a worker joins."""
        what = self.random.choice(("worker", "server", "server", COORDINATOR, "join", "join"))
        if what == "join" or not self.workers:
            if len(self.workers) < 3:
                self.add_worker()
        elif what == "worker":
            self.kill_worker(self.random.choice(sorted(self.workers)))
        else:
            self.kill_machine(what)

    def kill_worker(self, name):
        """The worker is gone without a word."""
        popen = self.workers.pop(name)
        popen.kill()
        popen.communicate()
        self.count("worker")

    def kill_machine(self, what):
        """The coordinator or a server is gone; a server only when others have everything that it has."""
        if what == COORDINATOR:
            if COORDINATOR not in self.killed or time.monotonic() - self.killed[COORDINATOR] > 6.0:
                self.killed[COORDINATOR] = time.monotonic()
                self.servers.kill(COORDINATOR)
                self.count(COORDINATOR)
            return
        view = self.observer.view
        lives = {member.name: member.incarnation for member in view.servers}
        are_up = all(lives.get(name) != life for name, life in self.killed.items() if name != COORDINATOR)
        if lives and are_up and all(keepers.is_complete for keepers in view.shards):
            name = self.random.choice(sorted(lives))
            self.killed[name] = lives[name]
            self.servers.kill(name)
            self.count("server")

    def count(self, what):
        """One more was killed."""
        self.ordeal.kills[what] = self.ordeal.kills.get(what, 0) + 1

    def close(self):
        """No worker is left."""
        for popen in self.workers.values():
            popen.kill()
            popen.communicate()


if __name__ == "__main__":
    import tempfile

    for number in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory(prefix="counterpoint-") as scratch:
            came = run(number, Path(scratch))
        sys.stdout.write(f"{number} {came.job.consistency} {came.job.num_servers} {came.kills} {came.num_joined} "
                         f"{came.seconds:.1f} s {'exact' if came.is_exact else came}\n")  # fmt: skip
