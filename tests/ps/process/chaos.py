"""Chaos testing of a job: servers, workers and the coordinator are killed at random; workers join and leave."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from counterpoint.errors import CounterpointError
from counterpoint.launchers.exec_wrapper import PR_SET_PDEATHSIG
from counterpoint.launchers.server_processes import start_servers
from counterpoint.ps.actions import COORDINATOR
from counterpoint.ps.coordinator import COORDINATOR_LOG
from counterpoint.ps.coordinator_state import CoordinatorState
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.process.disk_layout import log_path, read_records
from tests.forkserver import CONTEXT
from tests.ps.process.chaos_workloads import ChaosWorkload, CountingWorkload, TrainingWorkload

WORK_S = 110.0
"""In which all data has to be counted."""
LIVE_S = 60.0
"""In which the first worker has to be there."""
COORDINATOR_REST_S = 6.0
EXPELLED = "the job continues without this incarnation", "does not belong to the job; join again"


@dataclass
class ChaosRun:
    """The faults injected into a job, and its result.

    Attributes:
        seed: of the faults.
        job: its configuration.
        kills: number of killed processes by kind.
        num_joined: workers that were started.
        num_cuts: requested snapshots.
        num_expelled: workers that were evicted because their heartbeats were late.
        seconds: from the start to the result.
        values: what the workload reads in the end.
        errors: none if all data was counted.
    """

    seed: int
    job: JobConfig
    kills: dict[str, int] = field(default_factory=dict)
    num_joined: int = 0
    num_cuts: int = 0
    num_expelled: int = 0
    seconds: float = 0.0
    values: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def run(seed, folder, workload: ChaosWorkload, *, num_strikes=8):
    """Run a job to its end while faults are injected; return its result."""
    random = Random(seed)
    chaos_run = ChaosRun(seed, workload.draw_job(random))
    began = time.monotonic()
    spares = 1 if chaos_run.job.num_servers > 1 else 0
    with ExitStack() as stack:
        servers = stack.enter_context(start_servers(chaos_run.job, folder=folder, num_spares=spares, is_journaled=True))
        observer = stack.enter_context(servers.join("observer"))
        monkey = ChaosMonkey(chaos_run, servers, observer, random, workload.main, folder)
        stack.callback(monkey.close)
        for _ in range(2):
            monkey.add_worker()
        monkey.wait_for(lambda: monkey.is_over or len(observer.view.workers) > 1, LIVE_S, "a worker to join")
        pause = threading.Event()
        for _ in range(num_strikes):
            if not monkey.is_over:
                pause.wait(2 * random.random())
                monkey.inject_fault()
        monkey.wait_for(monkey.is_over_or_restart, WORK_S, "the end")
        if not chaos_run.errors:
            chaos_run.values = workload.read(observer)
    chaos_run.seconds = time.monotonic() - began
    return chaos_run


class ChaosMonkey:
    """Kills processes and starts workers."""

    def __init__(self, chaos_run, servers, observer, random, main, folder):
        self.chaos_run, self.servers, self.observer, self.random = chaos_run, servers, observer, random
        self.main, self.folder = main, folder
        self.workers = {}
        self.lasting = set()
        self.is_done = False
        self.kill_rank = {}

    def add_worker(self):
        """Start a worker, which may leave after a while."""
        self.chaos_run.num_joined += 1
        name = f"worker-{self.chaos_run.num_joined}"
        most = self.random.choice((0, 0, 20))
        self.lasting |= {name} if not most else set()
        arguments = self.main, self.stderr_path(name), (str(self.servers.contact_path), name, str(most))
        self.workers[name] = CONTEXT.Process(target=run_worker, args=arguments, name=name, daemon=True)
        self.workers[name].start()

    def stderr_path(self, name):
        """Where a worker's standard error goes."""
        return self.folder / f"{name}.txt"

    @property
    def is_over(self):
        """Whether a worker has found that all is done, or something has gone wrong."""
        for name, worker in list(self.workers.items()):
            if worker.exitcode is None:
                continue
            if worker.exitcode:
                self.record_exit(self.stderr_path(name).read_text())
            self.is_done = self.is_done or (worker.exitcode == 0 and name in self.lasting)
            del self.workers[name]
        try:
            self.servers.check()
        except CounterpointError as error:
            self.chaos_run.errors.append(str(error))
        return bool(self.chaos_run.errors) or self.is_done

    def record_exit(self, last_words):
        """A worker has ended by itself: it was wrong, or too slow for a busy machine, and then others do its work."""
        if any(words in last_words for words in EXPELLED):
            self.chaos_run.num_expelled += 1
        else:
            self.chaos_run.errors.append(last_words[-2000:])

    def is_over_or_restart(self):
        """Whether it is over; somebody works until it is."""
        if not self.is_over and not self.workers:
            self.add_worker()
        return self.is_over

    def wait_for(self, holds, deadline_s, what):
        """The condition holds, or it has gone wrong; then it says so."""
        pause, end = threading.Event(), time.monotonic() + deadline_s
        while not holds() and not self.chaos_run.errors:
            if time.monotonic() > end:
                self.chaos_run.errors.append(f"waited {deadline_s:g} s for {what}; {self.state()}")
            pause.wait(0.1)

    def state(self):
        """Who belongs to the job, who keeps what, and which data is left, as the coordinator's log says."""
        lines, _ = read_records(log_path(self.folder, COORDINATOR_LOG))
        job_state = CoordinatorState(self.chaos_run.job, lines)
        queue = job_state.tasks
        return (
            f"members {sorted(job_state.members)}, replicas {job_state.replicas}, being done {list(queue.doing.values())}, to do "
            f"{len(queue.todo)} of epoch {queue.epoch}, cut {job_state.snapshot}, {queue.stop_reason or job_state.loss_reason or 'not lost'}"
        )

    def inject_fault(self):
        """Somebody is killed, a worker joins, or a cut is asked for."""
        what = self.random.choice(("worker", "server", "server", COORDINATOR, "join", "join", "cut"))
        if what == "cut":
            self.chaos_run.num_cuts += 1
            self.observer.checkpoint()
        elif what == "join" or not self.workers:
            if len(self.workers) < 3:
                self.add_worker()
        elif what == "worker":
            self.kill_worker(self.random.choice(sorted(self.workers)))
        else:
            self.kill_machine(what)

    def kill_worker(self, name):
        """The worker is gone without a word."""
        kill_process(self.workers.pop(name))
        self.count("worker")

    def kill_machine(self, what):
        """The coordinator or a server is gone; a server only when others have everything that it has."""
        if what == COORDINATOR:
            if COORDINATOR not in self.kill_rank or time.monotonic() - self.kill_rank[COORDINATOR] > COORDINATOR_REST_S:
                self.kill_rank[COORDINATOR] = time.monotonic()
                self.servers.kill(COORDINATOR)
                self.count(COORDINATOR)
            return
        view = self.observer.view
        lives = {member.name: member.incarnation for member in view.servers}
        are_up = all(lives.get(name) != life for name, life in self.kill_rank.items() if name != COORDINATOR)
        if lives and are_up and all(replicas.is_backup_ready for replicas in view.replicas):
            name = self.random.choice(sorted(lives))
            self.kill_rank[name] = lives[name]
            self.servers.kill(name)
            self.count("server")

    def count(self, what):
        """One more was killed."""
        self.chaos_run.kills[what] = self.chaos_run.kills.get(what, 0) + 1

    def close(self):
        """No worker is left."""
        for worker in self.workers.values():
            kill_process(worker)


def run_worker(main, errors, arguments):
    """This process is a worker, as long as the one that it was forked from lives."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    main(*arguments)


def kill_process(worker):
    """The worker is gone without a word."""
    worker.kill()
    worker.join()


if __name__ == "__main__":
    import tempfile

    kind, *seeds = sys.argv[1:]
    for number in map(int, seeds):
        with tempfile.TemporaryDirectory(prefix="counterpoint-") as scratch:
            came = run(number, Path(scratch), {"counting": CountingWorkload, "training": TrainingWorkload}[kind]())
        sys.stdout.write(f"{number} {came.job.consistency} {came.job.num_servers} {came.kills} {came.num_joined} "
                         f"{came.num_cuts} {came.seconds:.1f} s {came.errors or came.values}\n")  # fmt: skip
