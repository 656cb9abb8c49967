"""Small ranks for the tests of launchers; none imports torch."""

import contextlib
import os
import sys
from pathlib import Path

from counterpoint.launchers import run_command, script_command

ROOT = Path(__file__).parents[2]


def script(folder, text, name="job.py"):
    path = folder / name
    path.write_text("import os, signal, sys, time\nrank = int(os.environ.get('RANK', -1))\n" + text)
    return path


def run(folder, text, ranks=3, **options):
    """Run a script of this text; return the result and its lines as (rank, stream, text)."""
    lines = []
    command = script_command(script(folder, text))
    result = run_command(
        command, ranks, on_line=lambda line: lines.append((line.rank, line.stream, line.text)), **options
    )
    return result, lines


def fifo(folder):
    """Make a pipe with a name; ranks that open it for writing end its reader only when all of them are gone."""
    path = folder / "alive"
    os.mkfifo(path)
    return path, f"alive = open({str(path)!r}, 'w'); alive.write('x'); alive.flush()\n"


def wait_for(path, ranks):
    """Return a file from which reading ends when every rank is gone; all of them have started."""
    file = path.open("rb", buffering=0)
    arrived = b""
    while len(arrived) < ranks:
        arrived += file.read(1) or b""
    return file


@contextlib.contextmanager
def supervisor(folder, path, ranks=2, grace_s=30.0):
    """Yield a process that supervises a script, as `counterpoint run` does, with its temporary files in ``folder``."""
    import subprocess

    code = (
        "import sys; from counterpoint.launchers import run_command, script_command\n"
        f"result = run_command(script_command({str(path)!r}), {ranks}, grace_s={grace_s})\n"
        "sys.stderr.write(result.report + '\\n'); sys.exit(result.exit_code)"
    )
    variables = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def add(left, right):
    return left + right + int(os.environ["RANK"])


def echo(value):
    return {"given": value, "rank": int(os.environ["RANK"])}


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise ValueError("no data here")


def give_an_object():
    return object()


def doubled(tensor):
    return (tensor * 2, int(os.environ["RANK"]))
