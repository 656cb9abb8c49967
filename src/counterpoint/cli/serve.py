"""``counterpoint serve``: the coordinator of a job with parameter servers, or one of these, until it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import collect_signals
from counterpoint.rpc.job_key import JobKey, read_key, read_key_from

if TYPE_CHECKING:
    from counterpoint.ps.job_config import JobConfig


def serve(
    role: Annotated[
        Literal["coordinator", "server", "resume"],
        typer.Argument(help="What this process is; resume runs nothing, but makes a job go on from its last cut."),
    ],
    *,
    job: Annotated[Path, typer.Option(help="The file that says what the job is and where its coordinator listens.")],
    name: Annotated[str, typer.Option(help="Of a server; one at a time may have it.")] = "",
    listen: Annotated[str, typer.Option(help="Where a server listens: tcp:HOST:PORT (0: any), or unix:NAME.")] = "",
    key_file: Annotated[Path | None, typer.Option(help="The job's key, in a file that only you may read.")] = None,
    key_fd: Annotated[int | None, typer.Option(help="The same, from an open descriptor.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For logs and cuts, so that this process can be started again.")
    ] = None,
    journal: Annotated[bool, typer.Option(help="Keep everything that is counted in the folder's journals.")] = False,
    snapshot: Annotated[int | None, typer.Option(help="The cut that the job goes on from.")] = None,
) -> None:
    """Run the coordinator of a job, or one of its servers, until Ctrl-C or SIGTERM.

    Without a key everything stays on this host. See docs/servers.md for a job over several hosts.
    """
    from counterpoint.ps.process.job_file import read_job_file
    from counterpoint.ps.process.serve import serve_coordinator, serve_shards
    from counterpoint.rpc.address import RpcAddress, parse_address

    def listens(place: RpcAddress) -> None:
        typer.echo(f"{name or role} of {contact.job.name} listens at {place}")

    contact = read_job_file(job)
    if role != "server" and (name or listen):
        raise LaunchError(f"a coordinator has no name and listens at {contact.coordinator}, as {job} says")
    if role == "resume":
        prepare_resume(contact.job, folder)
        return
    key = load_key(key_file, key_fd)
    with collect_signals() as received:
        if role == "coordinator":
            serve_coordinator(contact, key, folder, should_stop=lambda: bool(received), on_listen=listens)
            return
        if not name or not listen:
            raise LaunchError("a server needs --name and --listen, as --name server-0 --listen tcp:10.0.0.2:0")
        serve_shards(
            contact,
            name,
            parse_address(listen),
            key,
            folder,
            snapshot=snapshot,
            is_journaled=journal,
            should_stop=lambda: bool(received),
            on_listen=listens,
        )


def prepare_resume(job: JobConfig, folder: Path | None) -> None:
    """The job can be started again from its folder, and it is told how."""
    from counterpoint.ps.process.disk_layout import resume

    if folder is None:
        raise LaunchError("resume needs --folder: the one that the coordinator and the servers had")
    cut = resume(folder, job)
    how = "with the same folder" if cut is None else f"with the same folder, every server with --snapshot {cut}"
    typer.echo(f"{job.name} can go on: start its coordinator and its servers {how}")


def load_key(key_file: Path | None, key_fd: int | None) -> JobKey | None:
    """Return the job's key, from wherever it was given; None where it was not."""
    if key_file is not None and key_fd is not None:
        raise LaunchError("--key-file and --key-fd are both given; one of them has the key")
    if key_file is not None:
        return read_key(key_file)
    return None if key_fd is None else read_key_from(key_fd)
