"""Real processes: whatever ends a run, it ends soon, says why, and leaves nothing behind."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from counterpoint.errors import LaunchError
from counterpoint.launchers import OutputLine, run_command, script_command, write_prefixed
from counterpoint.launchers.machine import this_host
from counterpoint.launchers.ports import reserve_port
from tests.launchers.ranks import fifo, run, script, supervisor, wait_for

pytestmark = pytest.mark.process


def open_files():
    return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists())


def read_to_the_end(descriptor):
    """Return what is left in the pipe, once its other end is closed in all processes."""
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_every_rank_gets_the_torchrun_contract_and_its_share_of_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    result, lines = run(tmp_path, f"print(*[os.environ[name] for name in {names}])")
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert sorted(lines) == [(rank, "out", f"{rank} {rank} 3 3 127.0.0.1 {threads}") for rank in range(3)]
    assert (result.exit_code, result.report, result.failed_rank) == (0, "", None)


def test_threads_are_the_users_when_the_user_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(tmp_path, "print(os.environ['OMP_NUM_THREADS'])", 1)[1] == [(0, "out", "7")]
    assert run(tmp_path, "print(os.environ['OMP_NUM_THREADS'])", 1, threads_per_rank=3)[1] == [(0, "out", "3")]


def test_rank_0_may_listen_on_the_reserved_socket_and_others_reach_it(tmp_path):
    text = """
import socket
from counterpoint.launchers import detect
found = detect()
if rank == 0:
    meeting = socket.socket(fileno=found.store_fd)
    meeting.listen()
    meeting.accept()[0].sendall(b"hello")
else:
    peer = socket.socket()
    while peer.connect_ex((found.master_addr, found.master_port)): pass
    print(peer.recv(5).decode(), found.timeout_s, found.store_fd)
"""
    result, lines = run(tmp_path, text, 2, timeout_s=9)
    assert result.report == ""
    assert lines == [(1, "out", "hello 9.0 None")]


def test_a_rank_killed_by_kill_9_ends_the_run_within_5_s_and_is_named_first(tmp_path):
    began = time.monotonic()
    result, _ = run(tmp_path, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()")
    assert time.monotonic() - began < 5
    first, second = result.report.splitlines()
    assert first.startswith(f"rank 1 was killed by SIGKILL (pid {result.exits[1].pid}, after ")
    assert second == "ranks 0 and 2 stopped because of rank 1"
    assert result.exit_code == 137


@pytest.mark.long
def test_a_rank_that_ignores_sigterm_is_gone_within_5_s_all_the_same(tmp_path):
    began = time.monotonic()
    path, alive = fifo(tmp_path)
    text = f"""
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    {alive.strip()}
    while True: signal.pause()
open({str(path)!r}).read(1)
raise SystemExit("the disk is gone")
"""
    result, _ = run(tmp_path, text, 2)
    assert time.monotonic() - began < 5
    assert result.report.splitlines()[0] == f"rank 1 failed: SystemExit: the disk is gone at {tmp_path}/job.py:9"
    assert result.exits[0].returncode == -signal.SIGKILL


def test_an_exception_is_reported_with_its_location_and_printed_as_by_python(tmp_path):
    text = "def work():\n    raise ValueError('bad batch')\nif rank == 2:\n    work()\nsignal.pause()"
    result, lines = run(tmp_path, text)
    place = f"{tmp_path}/job.py"
    assert result.report.splitlines()[0] == f"rank 2 failed: ValueError: bad batch at {place}:4"
    assert result.report.splitlines()[1] == "ranks 0 and 1 stopped because of rank 2"
    shown = [text for rank, stream, text in lines if (rank, stream) == (2, "err")]
    assert shown[:2] == ["Traceback (most recent call last):", f'  File "{place}", line 6, in <module>']
    assert result.exit_code == 1


def test_the_cause_is_found_though_a_peer_error_came_first_in_time(tmp_path):
    path, _ = fifo(tmp_path)
    text = f"""
from counterpoint.errors import PeerError
if rank == 0:
    open({str(path)!r}, "w").write(str(os.getpid()))
    raise PeerError("rank 1 closed the connection")
if rank == 1:
    first = open({str(path)!r}).read()
    while os.path.exists("/proc/" + first): pass  # until the supervisor has seen its end
    raise RuntimeError("the true cause")
signal.pause()
"""
    result, _ = run(tmp_path, text)
    assert result.report.splitlines() == [
        f"rank 1 failed: RuntimeError: the true cause at {tmp_path}/job.py:11",
        "ranks 0 and 2 stopped because of rank 1",
    ]


def test_a_rank_that_only_blames_a_killed_one_is_quiet(tmp_path):
    """Its error stood on the screen before that of the rank that was killed."""
    path, _ = fifo(tmp_path)
    text = f"""
from counterpoint.errors import PeerError
if rank == 1:
    open({str(path)!r}, "w").write("here")
    os.kill(os.getpid(), signal.SIGKILL)
open({str(path)!r}).read()
raise PeerError("rank 1 closed the connection")
"""
    result, lines = run(tmp_path, text, 2)
    assert result.report.startswith("rank 1 was killed by SIGKILL (pid ")
    assert lines == []


BLAME = """
from counterpoint.errors import PeerError
raise PeerError("rank 0 waited 0.1 s for barrier of grad0 with rank 1: rank 1 has closed its fabric")
"""


def test_a_rank_that_leaves_is_the_cause_though_its_process_ends_after_the_error_of_the_other(tmp_path):
    path, _ = fifo(tmp_path)
    text = f"""
if rank == 1:
    import atexit
    atexit.register(signal.pause)
    open({str(path)!r}, "w").write("here")
    sys.exit(0)
open({str(path)!r}).read()
"""
    began = time.monotonic()
    result, lines = run(tmp_path, text + BLAME, 2)
    first, second = result.report.splitlines()
    assert first.startswith(f"rank 1 ended with exit code 0 at {tmp_path}/job.py:8 (pid {result.exits[1].pid}, after ")
    assert second.startswith("rank 0 stopped because of rank 1: rank 0 waited 0.1 s for barrier of grad0 with rank 1")
    assert (result.exit_code, result.failed_rank, lines) == (1, 1, [])
    assert time.monotonic() - began < 5


@pytest.mark.long(quick=["ctypes.PyDLL(None).pause()"])
@pytest.mark.parametrize("wait", ["while True: pass", "ctypes.PyDLL(None).pause()"])
def test_a_rank_that_hangs_is_the_cause_with_the_line_where_it_is(tmp_path, wait):
    path, _ = fifo(tmp_path)
    text = f"""
import ctypes
def work():
    open({str(path)!r}, "w").write("here")
    {wait}
if rank == 1: work()
open({str(path)!r}).read()
"""
    result, _ = run(tmp_path, text + BLAME, 2)
    first, *stack, last = result.report.splitlines()
    assert first.startswith(f"rank 1 was in work at {tmp_path}/job.py:7 (pid {result.exits[1].pid}, after ")
    assert stack[:2] == [f"  work at {tmp_path}/job.py:7", f"  <module> at {tmp_path}/job.py:8"]
    assert last.startswith("rank 0 stopped because of rank 1: rank 0 waited 0.1 s for")
    assert (result.exit_code, result.failed_rank) == (1, 1)


@pytest.mark.long
def test_a_rank_that_is_stopped_is_reported_and_is_the_cause(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("counterpoint.launchers.rank_activity.NOTICE_S", 0.0)
    path, _ = fifo(tmp_path)
    text = f"""
if rank == 1:
    open({str(path)!r}, "w").write(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
other = open({str(path)!r}).read()
while open("/proc/" + other + "/stat").read().rpartition(")")[2].split()[0] != "T": pass
"""
    monkeypatch.setattr("counterpoint.launchers.local.STATE_POLL_S", 0.0)
    result, _ = run(tmp_path, text + BLAME, 2)
    pid = result.exits[1].pid
    assert re.match(rf"rank 1 was stopped by SIGSTOP for \d s \(pid {pid}, after ", result.report)
    assert result.exits[1].returncode == -signal.SIGTERM
    assert capsys.readouterr().err == (
        f"counterpoint: rank 1 (pid {pid}) has been stopped by SIGSTOP for 0 s, and others may wait for it; "
        f"`kill -CONT {pid}` lets it go on\n"
    )


def test_ranks_that_wait_for_others_see_that_one_has_ended(tmp_path):
    """They waited for it until the timeout."""
    text = "from counterpoint.launchers.rank_main import has_exited_rank\n"
    text += "if rank == 1: os._exit(0)\nwhile not has_exited_rank(): pass\n"
    assert run(tmp_path, text + BLAME, 2)[0].report.startswith("rank 1 ended with exit code 0 (pid ")


@pytest.mark.long
def test_a_single_peer_error_also_ends_the_run(tmp_path):
    text = "if rank == 0:\n    raise ConnectionResetError('Connection reset by peer')\nsignal.pause()"
    result, _ = run(tmp_path, text, 2)
    assert result.report.startswith("rank 0 failed: ConnectionResetError: Connection reset by peer at ")


@pytest.mark.long(quick=["os._exit(5)-5"])
@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("sys.exit(0)", 0), ("os._exit(5)", 5)])
def test_the_exit_code_of_a_rank_is_that_of_the_run(tmp_path, ending, code):
    assert run(tmp_path, ending, 2)[0].exit_code == code


@pytest.mark.long(quick=["15-143"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_supervisor_ends_all_ranks_and_removes_its_files(tmp_path, number, code):
    path, alive = fifo(tmp_path)
    (tmp_path / "files").mkdir()
    with supervisor(tmp_path / "files", script(tmp_path, alive + "while True: signal.pause()")) as process:
        with wait_for(path, 2) as ranks:
            process.send_signal(number)
            assert ranks.read() == b""
        _, errors = process.communicate(timeout=10)
    assert process.returncode == code
    assert f"stopped by {signal.Signals(number).name}; all 2 ranks have ended" in errors
    assert "Traceback" not in errors
    assert list((tmp_path / "files").iterdir()) == []


def test_no_rank_outlives_a_supervisor_killed_by_kill_9(tmp_path):
    path, alive = fifo(tmp_path)
    job = script(tmp_path, alive + "while True: signal.pause()")
    with supervisor(tmp_path, job) as process, wait_for(path, 2) as ranks:
        process.kill()
        assert ranks.read() == b""


def test_what_a_rank_has_started_ends_with_it(tmp_path):
    path, alive = fifo(tmp_path)
    text = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", {alive + "import signal; signal.pause()"!r}])
with open({str(path)!r}) as file: file.read(1)
"""
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    run(tmp_path, text, 1)
    assert read_to_the_end(reader) == b""


def test_a_port_in_use_is_refused_with_the_process_that_holds_it(tmp_path):
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        port = int(other.stdout.readline())
        with pytest.raises(LaunchError) as caught:
            run(tmp_path, "", 1, port=port)
        other.stdin.close()
    expected = f"port {port} is taken by pid {other.pid} (python -u); one port serves one run; omit --port"
    assert expected in str(caught.value).replace(Path(sys.executable).name, "python")


def test_a_port_that_another_run_has_reserved_is_refused(tmp_path):
    with reserve_port(None) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is taken by another process"):
            run(tmp_path, "", 1, port=port)


def test_the_port_of_a_run_that_has_ended_is_free_again(tmp_path):
    text = """
import socket
meeting = socket.socket(fileno=int(os.environ["COUNTERPOINT_STORE_FD"]))
meeting.listen()
peer = socket.create_connection(meeting.getsockname())
meeting.accept()[0].close()
peer.recv(1)
"""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert [run(tmp_path, text, 1, port=port)[0].report for _ in range(2)] == ["", ""]


@pytest.mark.parametrize(
    ("argv", "ranks", "port", "text"),
    [
        (["python"], 0, None, "0 ranks cannot run; give at least 1"),
        (["no-such-program"], 1, None, "there is no command 'no-such-program'"),
        ([], 1, None, "there is no command ''"),
        ([sys.executable], 1, 70000, "port 70000 does not exist; give one from 1 to 65535, or omit --port"),
    ],
)
def test_what_cannot_start_is_refused(argv, ranks, port, text):
    with pytest.raises(LaunchError, match=text):
        run_command(argv, ranks, port=port)


@pytest.mark.parametrize("limit", [{"grace_s": math.nan}, {"grace_s": -1.0}, {"grace_s": math.inf}, {"timeout_s": 1e300}, {"timeout_s": 0.0},
                                   {"timeout_s": math.nan}])  # fmt: skip
def test_a_time_limit_that_never_passes_is_refused_before_a_rank_is_started(limit):
    with pytest.raises(
        LaunchError, match=r"is not a time limit; give a number of seconds (above 0|from 0 on), 2000000 at most"
    ):
        run_command([sys.executable], 1, **limit)


def test_ranks_whose_output_this_process_cannot_hold_open_are_refused_before_one_is_started():
    with pytest.raises(
        LaunchError, match=r"10000000 ranks need 20000032 open files .*; start fewer ranks on this host"
    ):
        run_command([sys.executable], 10**7)


def test_a_script_that_is_not_there_is_refused():
    with pytest.raises(LaunchError, match=r"there is no script nowhere\.py in /"):
        script_command(Path("nowhere.py"))


def test_lines_are_whole_and_say_which_rank_and_stream(tmp_path):
    text = r"sys.stdout.write(f'a{rank}'); sys.stdout.write('b\n\nlast'); sys.stderr.buffer.write(b'\xff\r\n')"
    _, lines = run(tmp_path, text, 2)
    for rank in range(2):
        assert [text for r, stream, text in lines if (r, stream) == (rank, "out")] == [f"a{rank}b", "", "last"]
        assert [text for r, stream, text in lines if (r, stream) == (rank, "err")] == ["\ufffd"]


def test_a_flood_without_a_line_end_arrives_whole_in_bounded_parts(tmp_path):
    _, lines = run(tmp_path, "sys.stdout.write('x' * 1_000_000)", 1)
    assert "".join(text for _, _, text in lines) == "x" * 1_000_000
    assert max(len(text) for _, _, text in lines) <= 2 * 65536 + 1


def test_prefixed_lines_go_to_the_stream_they_came_from(capsys):
    write_prefixed(OutputLine(1, "out", "step 3"))
    write_prefixed(OutputLine(0, "err", "warning"))
    assert capsys.readouterr() == ("[rank 1] step 3\n", "[rank 0] warning\n")


def test_no_file_and_no_signal_setting_is_left_after_a_run(tmp_path):
    run(tmp_path, "", 1)
    before, handlers = open_files(), [signal.getsignal(number) for number in (2, 15, 1)]
    for text in ("", "raise ValueError", "os.kill(os.getpid(), 9)"):
        run(tmp_path, text, 2)
    assert open_files() == before
    assert [signal.getsignal(number) for number in (2, 15, 1)] == handlers


def test_no_rank_outlives_an_error_in_the_code_that_takes_its_lines(tmp_path):
    path, alive = fifo(tmp_path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    command = script_command(script(tmp_path, alive + "print('now', flush=True)\nsignal.pause()"))

    def fail(line):
        raise OSError("the pipe is closed")

    before = open_files()
    with pytest.raises(OSError, match="the pipe is closed"):
        run_command(command, 2, on_line=fail)
    assert open_files() == before
    assert read_to_the_end(reader).strip(b"x") == b""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to tell ranks apart")
def test_ranks_are_bound_to_cores_of_their_own_before_they_start(tmp_path):
    _, lines = run(tmp_path, "print(*sorted(os.sched_getaffinity(0)))", 2, threads_per_rank=1, bind="core")
    first, second = (set(text.split()) for _, _, text in sorted(lines))
    assert first
    assert second
    assert not first & second


def test_ranks_that_outnumber_the_cores_have_one_thread_each_and_the_user_knows(tmp_path, capsys):
    cores = this_host().num_usable
    _, lines = run(tmp_path, "print(os.environ['OMP_NUM_THREADS'])", cores + 1, threads_per_rank=2)
    assert {text for _, _, text in lines} == {"1"}
    assert f"counterpoint: {cores + 1} ranks x 2 threads on {cores} core" in capsys.readouterr().err


AWAIT_SIGNAL = "while not seen: select.select([], [], [], 0.01)"
"""Waits until a signal was seen; signal.pause() would miss one that came just before it."""
FINISHES = """
def finish(number, frame):
    seen.append(number)
seen = []
signal.signal(signal.SIGTERM, finish)
signal.signal(signal.SIGUSR1, finish)
"""


@pytest.mark.long(quick=["10-138"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)])
def test_ranks_get_a_signal_once_and_may_finish_though_the_supervisor_gets_it_twice(tmp_path, number, code):
    path, alive = fifo(tmp_path)
    (tmp_path / "go").touch()
    text = f"import select\n{FINISHES}{alive}{AWAIT_SIGNAL}\nalive.write('y'); alive.flush()\n"
    text += f"while os.path.exists({str(tmp_path / 'go')!r}): pass\nprint('seen', *seen, flush=True)\n"
    with supervisor(tmp_path, script(tmp_path, text)) as process:
        with wait_for(path, 2) as ranks:
            process.send_signal(number)
            assert {ranks.read(1), ranks.read(1)} == {b"y"}
            process.send_signal(number)
            (tmp_path / "go").unlink()
        output, errors = process.communicate(timeout=10)
    seen = signal.SIGTERM if number == signal.SIGHUP else number
    assert sorted(output.splitlines()) == [f"[rank {rank}] seen {int(seen)}" for rank in range(2)]
    assert (process.returncode, errors) == (code, f"stopped by {number.name}; all 2 ranks have ended\n")


@pytest.mark.long
def test_a_rank_that_has_not_ended_after_the_grace_period_is_killed_and_the_report_says_so(tmp_path):
    path, alive = fifo(tmp_path)
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if rank else None\n" + alive + "while True: signal.pause()"
    with supervisor(tmp_path, script(tmp_path, text), grace_s=0.2) as process:
        with wait_for(path, 2):
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    assert errors.splitlines() == [
        "stopped by SIGTERM; all 2 ranks have ended",
        "rank 1 had not ended 0.2 s after the signal and was killed; give more time with --grace",
    ]


@pytest.mark.long
def test_ctrl_c_waits_for_the_grace_period_and_a_second_one_kills_at_once(tmp_path):
    """Ranks that wrote their report on a busy machine were killed after 2 s, and told to take a longer --grace."""
    path, alive = fifo(tmp_path)
    text = "import select\nseen = []\nsignal.signal(signal.SIGINT, lambda *_: seen.append(1))\n" + alive
    text += f"{AWAIT_SIGNAL}\nalive.write('y'); alive.flush()\nwhile True: signal.pause()"
    with supervisor(tmp_path, script(tmp_path, text)) as process:
        with wait_for(path, 2) as ranks:
            process.send_signal(signal.SIGINT)
            assert {ranks.read(1), ranks.read(1)} == {b"y"}
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.2)
            process.send_signal(signal.SIGINT)
            assert ranks.read() == b""
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.splitlines() == [
        "stopped by SIGINT; all 2 ranks have ended",
        "ranks 0 and 1 had not ended when Ctrl-C came again, and were killed",
    ]


def test_ranks_that_a_signal_to_one_of_them_has_stopped_are_no_failure(tmp_path):
    text = """
from counterpoint.errors import StoppedBySignal
raise StoppedBySignal("stopped by SIGTERM after step 3; saved a/step-00000003", 15)
"""
    result, _ = run(tmp_path, text, 2)
    assert (result.exit_code, result.failed_rank) == (143, None)
    assert result.report == "stopped by SIGTERM after step 3; saved a/step-00000003; all 2 ranks have ended"


@pytest.mark.long(quick=["2-130"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGINT, 130)])
def test_a_rank_that_cannot_save_when_it_is_stopped_is_a_failure_and_the_first_line(tmp_path, number, code):
    """The report said that all had stopped, and the exit code that the run can be continued from its last step."""
    path, alive = fifo(tmp_path)
    text = f"""
import time
from counterpoint.errors import CheckpointError
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
{alive.strip()}
while not seen: time.sleep(0.01)
raise CheckpointError("the run has ended at step 3 without its last checkpoint")
"""
    with supervisor(tmp_path, script(tmp_path, text)) as process:
        with wait_for(path, 2):
            process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    report = [line for line in errors.splitlines() if not line.startswith("[rank ")]
    failures = [
        line for line in report if re.match(r"rank \d failed: CheckpointError: .* its last checkpoint at ", line)
    ]
    assert (process.returncode, report) == (code, [*failures, f"stopped by {number.name}; all 2 ranks have ended"])
    assert len(failures) == (code == 1)


@pytest.mark.long(quick=["10"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_while_stopped_ranks_exit_changes_neither_the_exit_code_nor_the_report(tmp_path, number):
    """A scheduler that sent USR1 and then TERM to the ranks got exit code 1 if TERM came while Python was exiting."""
    text = f"""
import atexit
from counterpoint.errors import StoppedBySignal
atexit.register(signal.raise_signal, {int(number)})
raise StoppedBySignal("stopped by SIGUSR1 after step 3; saved a/step-00000003", {int(signal.SIGUSR1)})
"""
    result, _ = run(tmp_path, text, 2)
    assert (result.exit_code, result.failed_rank) == (138, None)
    assert result.report == "stopped by SIGUSR1 after step 3; saved a/step-00000003; all 2 ranks have ended"
    ended = -signal.SIGKILL if number == signal.SIGKILL else 138
    assert [rank_exit.returncode for rank_exit in result.exits] == [ended, ended]
