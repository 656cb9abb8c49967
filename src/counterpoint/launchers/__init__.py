"""How ranks start, and how a run ends when one of them does: the only room that reads the environment.

The contract between a launcher and a rank is torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and TORCHELASTIC_RUN_ID. Whoever sets them has started a rank; ``detect`` reads them.
"""

from counterpoint.launchers.environment import RankEnvironment, detect
from counterpoint.launchers.function import import_path, launch
from counterpoint.launchers.local import OutputLine, RunResult, run_command, script_command, write_prefixed
from counterpoint.launchers.rank_main import report_error

__all__ = [
    "OutputLine",
    "RankEnvironment",
    "RunResult",
    "import_path",
    "detect",
    "launch",
    "report_error",
    "run_command",
    "script_command",
    "write_prefixed",
]
