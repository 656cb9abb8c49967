"""Entry point of a rank process that a Spark task starts: call the user's function and store its result."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from counterpoint.launchers.environment import detect
from counterpoint.launchers.function import read_value, write_value
from counterpoint.launchers.function_main import find_function
from counterpoint.launchers.rank_main import run_with_error_report
from counterpoint.launchers.spark import TRACEBACK, TRACEBACK_LINES
from counterpoint.spark.sample_readers import SAMPLES
from counterpoint.spark.shard import read_shard


def call(folder: Path) -> None:
    """Call the function named in ``folder``; store its result there, or the last lines of its traceback."""
    request = read_value(folder, "call")
    sys.path[:] = request["path"]
    environment = detect()
    assert environment is not None, "a task starts nothing but ranks"
    try:
        args = read_value(folder, "args")
        samples = [read_shard(folder / SAMPLES)] if (folder / SAMPLES).exists() else []
        write_value(folder, f"result-{environment.rank}", find_function(request["target"])(*samples, *args))
    except BaseException:
        lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        (folder / TRACEBACK).write_text("\n".join(lines), encoding="utf-8")
        raise


if __name__ == "__main__":
    sys.exit(run_with_error_report(lambda: call(Path(sys.argv[1]))))
