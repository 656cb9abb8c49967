"""The first line of a failed run names the rank at fault, not one that has waited for it."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from counterpoint.launchers import run_command, script_command
from counterpoint.launchers.local import OutputLine

pytestmark = pytest.mark.process
JOB = Path(__file__).with_name("fault_job.py")
HANG_TIMEOUT_S = 6.0


@dataclass(frozen=True)
class Scenario:
    """A fault of rank 1, and the first line of the report.

    Args:
        fault: of ``fault_job.py``.
        place: where it occurs.
        first_line: pattern that the line starts with.
        loop: how the job trains.
        strategy: of the job.
        transport: of the job.
        ranks: of the job.
        timeout_s: how long ranks wait.
        is_quick: whether `make test` runs it.
    """

    fault: str
    place: str
    first_line: str
    loop: str = "fit"
    strategy: str = "data(2)"
    transport: str = "shm"
    ranks: int = 2
    timeout_s: float = 30.0
    is_quick: bool = False

    @property
    def name(self):
        return f"{self.fault} in {self.place} of {self.loop}, {self.strategy}, {self.transport}"


EXIT = r"rank 1 ended with exit code 0 (at \S+:\d+ )?\(pid \d+, after [\d.]+ s\), but others waited for it"
LOCATED_EXIT = r"rank 1 ended with exit code 0 at \S+fault_job.py:\d+ \(pid"
MISMATCH = r"ranks 0 and 1 failed: PeerError: ranks 0 and 1 disagree on collective \d+ of their group: "
STOPPED = r"rank 1 was stopped by SIGSTOP for \d+ s \(pid \d+, after [\d.]+ s\), and others waited for it"


def killed(name):
    return rf"rank 1 was killed by {name} \(pid \d+, after"


def hung(function):
    return rf"rank 1 was in {function} at \S+:\d+ \(pid \d+, after [\d.]+ s\), and others waited for it"


def raised(text):
    return rf"rank 1 failed: {text}"


SCENARIOS = [
    Scenario("SIGKILL", "forward", killed("SIGKILL")),
    Scenario("SIGKILL", "callback", killed("SIGKILL"), transport="gloo"),
    Scenario("SIGSEGV", "backward", killed("SIGSEGV")),
    Scenario("SIGABRT", "callback", killed("SIGABRT")),
    Scenario("SIGBUS", "dataset", killed("SIGBUS")),
    Scenario("raise", "forward", raised("ValueError: no data here at")),
    Scenario("raise", "backward", raised("ValueError: no data here at")),
    Scenario("raise", "dataset", raised("ValueError: no data here at")),
    Scenario("raise", "worker", raised("DataError: loader worker 0 .*ValueError: no data here")),
    Scenario("raise", "callback", raised("ValueError: no data here at"), strategy="zero3(2)"),
    Scenario("target", "nowhere", r"rank \d failed: IndexError: Target 99 is out of bounds"),
    Scenario("_exit", "callback", EXIT),
    Scenario("_exit", "start", EXIT),
    Scenario("exit", "start", LOCATED_EXIT, transport="gloo"),
    Scenario("exit", "between", LOCATED_EXIT, loop="loop", is_quick=True),
    Scenario("exit", "callback", LOCATED_EXIT, strategy="pipeline(2)"),
    Scenario(
        "break", "nowhere", MISMATCH + "rank 0 starts barrier of grad0.*; rank 1 starts barrier of leaving", loop="loop"
    ),
    Scenario("return", "nowhere", EXIT, loop="loop", transport="gloo"),
    Scenario("loop", "callback", hung("wait_in_a_loop"), timeout_s=HANG_TIMEOUT_S),
    Scenario("wait", "forward", hung("<lambda>"), strategy="pipeline(2)", timeout_s=HANG_TIMEOUT_S),
    Scenario("lock", "dataset", hung("wait_for_a_lock"), timeout_s=HANG_TIMEOUT_S, transport="gloo"),
    Scenario("native", "backward", hung("wait_in_native_code"), timeout_s=HANG_TIMEOUT_S),
    Scenario("wait", "worker", r"rank 1 ", timeout_s=HANG_TIMEOUT_S),
    Scenario("SIGSTOP", "callback", STOPPED, timeout_s=HANG_TIMEOUT_S),
    Scenario("SIGSTOP", "between", STOPPED, loop="loop", transport="gloo", timeout_s=HANG_TIMEOUT_S),
    Scenario("SIGSTOP", "start", STOPPED, timeout_s=HANG_TIMEOUT_S, strategy="zero3(2)"),
    Scenario("SIGKILL", "worker", raised("DataError: loader worker 0 .*was killed by SIGKILL")),
    Scenario("memory", "callback", raised("RuntimeError: .*can't allocate memory")),
    Scenario("nan", "nowhere", r"rank \d failed: DataError: "),
    Scenario("skip", "nowhere", MISMATCH, loop="loop"),
    Scenario("export", "nowhere", MISMATCH, loop="loop"),
    Scenario("SIGKILL", "between", killed("SIGKILL"), loop="loop", strategy="zero3(2)"),
    Scenario("raise", "callback", raised("ValueError: no data here at"), strategy="server(2)", ranks=3),
    Scenario("exit", "callback", LOCATED_EXIT, strategy="server(2)", ranks=3),
    Scenario("loop", "forward", hung("wait_in_a_loop"), strategy="zero3(2)", timeout_s=HANG_TIMEOUT_S),
]


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name, marks=() if one.is_quick else pytest.mark.slow) for one in SCENARIOS],
)
def test_the_first_line_names_the_rank_at_fault(scenario):
    command = script_command(JOB, [scenario.loop, scenario.strategy, scenario.place, scenario.fault])
    lines: list[OutputLine] = []
    result = run_command(
        command,
        scenario.ranks,
        timeout_s=scenario.timeout_s,
        transport=scenario.transport,
        on_line=lines.append,
        threads_per_rank=1,
    )
    first, *rest = result.report.splitlines() or [""]
    assert re.match(scenario.first_line, first), "\n".join([first, *rest, *(line.text for line in lines)])
    assert result.exit_code != 0
