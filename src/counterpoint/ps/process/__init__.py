"""Coordinator, servers and workers as processes: the state machines of ``ps`` connected to sockets, disk and clock."""

from counterpoint.ps.process.job_file import JobEndpoint, read_job_file, write_job_file
from counterpoint.ps.process.join_job import join

__all__ = ["JobEndpoint", "join", "read_job_file", "write_job_file"]
