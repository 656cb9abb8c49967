"""``counterpoint serve``: the coordinator of a job with parameter servers, or one of these, until it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from counterpoint.errors import LaunchError
from counterpoint.launchers.local import caught_signals
from counterpoint.server.wire.key import JobKey, read_key, read_key_from

if TYPE_CHECKING:
    from counterpoint.server.job import Job


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
    cut: Annotated[int | None, typer.Option(help="The cut that the job goes on from.")] = None,
) -> None:
    """Run the coordinator of a job, or one of its servers, until Ctrl-C or SIGTERM.

    Without a key everything stays on this host. See docs/servers.md for a job over several hosts.
    """
    from counterpoint.server.hosting.contact import read_contact
    from counterpoint.server.hosting.serving import serve_coordinator, serve_shards
    from counterpoint.server.wire.place import Place, parse_place

    def listens(place: Place) -> None:
        typer.echo(f"{name or role} of {contact.job.name} listens at {place}")

    contact = read_contact(job)
    if role != "server" and (name or listen):
        raise LaunchError(f"a coordinator has no name and listens at {contact.coordinator}, as {job} says")
    if role == "resume":
        go_on(contact.job, folder)
        return
    key = read_any_key(key_file, key_fd)
    with caught_signals() as received:
        if role == "coordinator":
            serve_coordinator(contact, key, folder, is_over=lambda: bool(received), listens=listens)
            return
        if not name or not listen:
            raise LaunchError("a server needs --name and --listen, as --name server-0 --listen tcp:10.0.0.2:0")
        serve_shards(
            contact,
            name,
            parse_place(listen),
            key,
            folder,
            cut=cut,
            is_journaled=journal,
            is_over=lambda: bool(received),
            listens=listens,
        )


def go_on(job: Job, folder: Path | None) -> None:
    """The job can be started again from its folder, and it is told how."""
    from counterpoint.server.hosting.resuming import resume

    if folder is None:
        raise LaunchError("resume needs --folder: the one that the coordinator and the servers had")
    cut = resume(folder, job)
    how = "with the same folder" if cut is None else f"with the same folder, every server with --cut {cut}"
    typer.echo(f"{job.name} can go on: start its coordinator and its servers {how}")


def read_any_key(key_file: Path | None, key_fd: int | None) -> JobKey | None:
    """Return the job's key, from wherever it was given; None where it was not."""
    if key_file is not None and key_fd is not None:
        raise LaunchError("--key-file and --key-fd are both given; one of them has the key")
    if key_file is not None:
        return read_key(key_file)
    return None if key_fd is None else read_key_from(key_fd)
