"""``counterpoint serve``: run the coordinator of a parameter-server job, or one of its servers, until it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterpoint.cli.echo import echo
from counterpoint.errors import LaunchError
from counterpoint.launchers.signals import collect_signals
from counterpoint.rpc.job_key import JobKey, read_key, read_key_from

if TYPE_CHECKING:
    from counterpoint.ps.job_config import JobConfig


def serve(
    role: Annotated[
        Literal["coordinator", "server", "resume"],
        typer.Argument(help="The role; resume runs nothing, but prepares a job to restart from its last snapshot."),
    ],
    *,
    job: Annotated[Path, typer.Option(help="Job file, with the address of the coordinator.")],
    name: Annotated[str, typer.Option(help="Name of the server; unique among running servers.")] = "",
    listen: Annotated[str, typer.Option(help="Address of the server: tcp:HOST:PORT (0: any), or unix:NAME.")] = "",
    key_file: Annotated[Path | None, typer.Option(help="File with the job's key, readable only by you.")] = None,
    key_fd: Annotated[int | None, typer.Option(help="Open descriptor of the job's key.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for logs and snapshots, so that this process can be restarted.")
    ] = None,
    journal: Annotated[bool, typer.Option(help="Log every update in the folder's journals.")] = False,
    snapshot: Annotated[int | None, typer.Option(help="The snapshot to restart from.")] = None,
) -> None:
    """Run the coordinator of a job, or one of its servers, until Ctrl-C or SIGTERM.

    Over TCP a job needs a key, which `counterpoint key` makes. See docs/how-to/parameter-servers.md.
    """
    from counterpoint.ps.process.job_file import read_job_file
    from counterpoint.ps.process.serve import serve_coordinator, serve_shards
    from counterpoint.rpc.address import RpcAddress, parse_address

    def on_listen(place: RpcAddress) -> None:
        echo(f"{name or role} of {contact.job.name} listens at {place}")

    contact = read_job_file(job)
    if role != "server" and (name or listen):
        raise LaunchError(f"a coordinator has no --name, and listens at the address in {job}, {contact.coordinator}")
    if role == "resume":
        prepare_resume(contact.job, folder)
        return
    key = load_key(key_file, key_fd)
    with collect_signals() as received:
        if role == "coordinator":
            serve_coordinator(contact, key, folder, should_stop=lambda: bool(received), on_listen=on_listen)
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
            on_listen=on_listen,
        )


def prepare_resume(job: JobConfig, folder: Path | None) -> None:
    """Prepare the folder of a stopped job for a restart, and print how to start it."""
    from counterpoint.ps.process.disk_layout import resume

    if folder is None:
        raise LaunchError("resume needs --folder, that of the coordinator and the servers")
    cut = resume(folder, job)
    how = "with the same folder" if cut is None else f"with the same folder, every server with --snapshot {cut}"
    echo(f"{job.name} can be restarted: start its coordinator and its servers {how}")


def load_key(key_file: Path | None, key_fd: int | None) -> JobKey | None:
    """Load the job's key from a file or a descriptor; None if neither is given."""
    if key_file is not None and key_fd is not None:
        raise LaunchError("--key-file and --key-fd are both given; give one of them")
    if key_file is not None:
        return read_key(key_file)
    return None if key_fd is None else read_key_from(key_fd)
