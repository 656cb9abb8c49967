"""A job whose coordinator and servers have threads of their own in this process, and real sockets between them."""

import os
import threading
import time
from itertools import count

import pytest

from counterpoint.errors import CounterpointError
from counterpoint.ps.job_config import Timeouts
from counterpoint.ps.process.job_file import JobEndpoint
from counterpoint.ps.process.join_job import join
from counterpoint.ps.process.serve import serve_coordinator, serve_shards
from counterpoint.rpc.address import parse_address
from counterpoint.rpc.job_key import new_key

TIMEOUTS = Timeouts(heartbeat_s=0.1, failure_timeout_s=2.0, lease_s=30.0, resend_s=0.2)
JOIN_S = 20.0
NUMBERS = count()


def wait_until(holds, deadline_s=JOIN_S):
    """The condition holds; it is looked at again and again."""
    pause, end = threading.Event(), time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end
        pause.wait(0.02)


class ThreadedJob:
    """The coordinator and the servers of a job, each in a thread that can be stopped by itself."""

    def __init__(self, job, folder=None, **options):
        self.key = new_key()
        self.folder, self.options = folder, options
        self.prefix = f"unix:test-{os.getpid()}-{next(NUMBERS)}"
        self.contact = JobEndpoint(job, parse_address(f"{self.prefix}-coordinator"))
        self.running = {}
        self.failures = []
        self.start_coordinator()
        for index in range(job.num_servers):
            self.start_server(f"server-{index}")

    def start_coordinator(self):
        self._start("coordinator", serve_coordinator, self.contact, self.key, self.folder)

    def start_server(self, name):
        place = parse_address(f"{self.prefix}-{name}")
        self._start(name, serve_shards, self.contact, name, place, self.key, self.folder, **self.options)

    def _start(self, name, serve, *arguments, **options):
        over = threading.Event()

        def run():
            try:
                serve(*arguments, should_stop=over.is_set, **options)
            except CounterpointError as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        self.running[name] = over, thread

    def join(self, name, **options):
        return join(self.contact, name, self.key, timeout_s=JOIN_S, **options)

    def stop(self, name):
        over, thread = self.running.pop(name)
        over.set()
        thread.join(JOIN_S)

    def close(self):
        for over, _ in self.running.values():
            over.set()
        for name in list(self.running):
            self.stop(name)
        assert not self.failures


@pytest.fixture
def threads(request):
    """What starts a job's threads, all of which have ended afterwards."""
    started = []

    def start(job, folder=None, **options):
        started.append(ThreadedJob(job, folder, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()
