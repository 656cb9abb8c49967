"""What a process has to know to join a job: what the job is, and where its coordinator listens; as a JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from counterpoint.errors import LaunchError, ProtocolError
from counterpoint.ps.job_config import JobConfig
from counterpoint.ps.message_codec import decode_as, encode_message
from counterpoint.rpc.address import RpcAddress, parse_address


@dataclass(frozen=True, slots=True)
class JobEndpoint:
    """Where a job is found.

    Args:
        job: what all agree on.
        coordinator: where its coordinator listens.
    """

    job: JobConfig
    coordinator: RpcAddress


def write_job_file(endpoint: JobEndpoint, path: Path) -> None:
    """The file says where the job is found; whatever it said before, in one step.

    Raises:
        LaunchError: it cannot be written.
    """
    _, plain, _ = encode_message(endpoint.job)
    text = json.dumps({"coordinator": str(endpoint.coordinator), "job": plain}, indent=2)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise LaunchError(f"cannot write the job to {path}: {error.strerror}; give a folder that is yours") from error


def read_job_file(path: Path) -> JobEndpoint:
    """Return where the job of this file is found.

    Raises:
        LaunchError: the file cannot be read, or is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        job = decode_as({"job": JobConfig}, "job", found["job"], [])
        return JobEndpoint(job, parse_address(str(found["coordinator"])))
    except OSError as error:
        raise LaunchError(
            f"cannot read a job in {path}: {error.strerror}; give the file that says what it is"
        ) from error
    except (ValueError, KeyError, TypeError, ProtocolError) as error:
        raise LaunchError(f"{path} does not say what a job is: {error}; let write_contact write it") from error
