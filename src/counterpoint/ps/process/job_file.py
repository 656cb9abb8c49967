"""The job file: job configuration and coordinator address as JSON, which a process needs to join."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError, ProtocolError
from counterpoint.file_reader import read_regular_file
from counterpoint.file_writer import replace_file
from counterpoint.json_reader import parse_json_file
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import decode_as, encode_message
from counterpoint.rpc.address import RpcAddress, parse_address


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    """A job and the address of its coordinator.

    Args:
        job: configuration.
        coordinator: address at which its coordinator listens.
    """

    job: JobConfig
    coordinator: RpcAddress


def write_job_file(endpoint: JobEndpoint, path: Path) -> None:
    """Write the job file, replacing it atomically.

    Raises:
        LaunchError: it cannot be written.
    """
    _, fields, _ = encode_message(endpoint.job)
    text = json.dumps({"coordinator": str(endpoint.coordinator), "job": fields}, indent=2)
    try:
        replace_file(path, text + "\n")
    except OSError as error:
        raise LaunchError(f"cannot write the job file {path}: {error.strerror}; give a writable folder") from error


def read_job_file(path: Path) -> JobEndpoint:
    """Return the content of a job file.

    Raises:
        LaunchError: it cannot be read, or is not a job file.
    """
    try:
        content = parse_json_file(read_regular_file(path, max_bytes=2**20))
        job = decode_as({"job": JobConfig}, "job", content["job"], [])
        return JobEndpoint(job, parse_address(str(content["coordinator"])))
    except OSError as error:
        raise LaunchError(
            f"cannot read the job file {path}: {error.strerror}; give the file that write_job_file wrote"
        ) from error
    except (ValueError, KeyError, TypeError, ProtocolError) as error:
        raise LaunchError(f"{path} is not a job file: {error}; create it with write_job_file") from error
