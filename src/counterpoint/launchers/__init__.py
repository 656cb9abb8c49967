"""Start ranks, detect them, and report how a run ended. The only package that reads environment variables.

The contract between a launcher and a rank is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and TORCHELASTIC_RUN_ID. :func:`detect` reads them, and the equivalents of other launchers.
"""

from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.launchers.function import import_path, launch
from counterpoint.launchers.local import OutputLine, RunResult, run_command, script_command, write_prefixed
from counterpoint.launchers.rank_main import report_error

__all__ = [
    "OutputLine",
    "RankEnvironment",
    "RunResult",
    "detect",
    "import_path",
    "launch",
    "report_error",
    "run_command",
    "script_command",
    "write_prefixed",
]
