"""Read mutated inputs: ``python -m tests.fuzz.fuzz --seconds 600``; guided by coverage where atheris is installed.

An input fails if a reader raises anything but the package's own errors, takes too long or too much memory, or does one of
``FORBIDDEN_EVENTS``. It is then written to ``tests/fuzz/corpus``, whose files ``make test`` reads again.
"""

import argparse
import gc
import hashlib
import importlib.util
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
FORBIDDEN_EVENTS = frozenset({
    "exec", "compile", "marshal.loads", "pickle.find_class", "os.system", "os.exec", "os.fork", "os.forkpty",
    "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "socket.bind", "ctypes.dlopen", "code.__new__",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "shutil.rmtree",
    "os.kill", "os.putenv", "os.unsetenv",
})  # fmt: skip
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TOKENS = [
    b"\0", b"\xff", b"[", b"]", b"{", b"}", b'"', b",", b":", b"*a", b"&a ", b"<<: ", b"- ", b"null", b"-1", b"1e999", b"NaN",
    b"9" * 30, b"0x10", b"\\ud800", b"\n", b"  ", b"(", b")", b"=", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"[" * 300,
    b'["shared",0]', b'["name","os:system"]', b'["partial",["name","cProfile:run"],["list","1"],{}]', b'"forward"', b"true",
    b"18446744073709551616", b"!!python/object:os.system ", b"..", b"/", b"\x1b]0;x\x07", "é\u202e".encode(),
]  # fmt: skip
MAX_SECONDS = 5.0
MAX_MEMORY_BYTES = 64 << 20  # of all inputs together: each may take four times its size, which is less than 1 MiB
MAX_INPUT_BYTES = 8192
PROGRESS_INPUTS = 100_000


class Watch:
    """Notes the events of Python's audit hooks while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if not self.is_on:
            return
        is_import = event == "import" and args[0] not in sys.modules
        is_write = event == "open" and isinstance(args[2], int) and bool(args[2] & WRITE_FLAGS)
        if event in FORBIDDEN_EVENTS or is_import or is_write:
            self.events.append(f"{event} {str(args[0])[:100] if args else ''}")

    @contextmanager
    def on(self) -> Iterator[list[str]]:
        self.is_on, self.events = True, []
        try:
            yield self.events
        finally:
            self.is_on = False


def read_once(name: str, raw: bytes, watch: Watch) -> str:
    """Read an input, and return what is wrong with how it was read; empty if nothing is."""
    from counterpoint.errors import CounterpointError
    from tests.fuzz.readers import READERS

    start = time.process_time()
    with watch.on() as events:
        try:
            READERS[name].read(raw)
        except CounterpointError as error:
            if len(str(error)) > 20_000:
                return f"a message of {len(str(error))} characters"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
            return f"{type(error).__name__}: {str(error)[:200]}"
    if events:
        return f"events: {events}"
    seconds = time.process_time() - start
    return f"{seconds:.1f} s" if seconds > MAX_SECONDS else ""


def mutate(source: random.Random, inputs: list[bytes]) -> bytes:
    """Return an input with a few changes: bits, bytes, tokens, and pieces of it and of others."""
    raw = bytearray(source.choice(inputs))
    for _ in range(source.choice((1, 1, 2, 4))):
        at = source.randrange(len(raw) + 1)
        match source.randrange(7):
            case 0 if raw:
                raw[at % len(raw)] ^= 1 << source.randrange(8)
            case 1 if raw:
                raw[at % len(raw)] = source.randrange(256)
            case 2:
                raw[at : at + source.randrange(1, 9)] = b""
            case 3:
                raw[at:at] = source.choice(TOKENS)
            case 4:
                token = source.choice(TOKENS)
                raw[at : at + len(token)] = token
            case 5:
                other = source.choice(inputs)
                start = source.randrange(len(other) + 1)
                raw[at : at + source.randrange(9)] = other[start : start + source.randrange(64)]
            case _:
                length = source.randrange(1, 64)
                raw[at:at] = raw[at : at + length] * source.choice((1, 1, 1, 20))
    return bytes(raw[:MAX_INPUT_BYTES])


def corpus(name: str) -> list[bytes]:
    """Return the examples of a reader, and what is kept in its folder."""
    from tests.fuzz.readers import READERS

    kept = sorted((CORPUS / name.replace(" ", "_")).glob("*"))
    return [*READERS[name].examples(), *(path.read_bytes() for path in kept)]


def keep(name: str, raw: bytes) -> Path:
    path = CORPUS / name.replace(" ", "_") / hashlib.sha256(raw).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    return path


def fuzz(name: str, seconds: float, runs: int, seed: int) -> int:
    """Mutate inputs of one reader for some time or number of runs, and return the number of kinds of findings."""
    watch, source, inputs = Watch(), random.Random(seed), corpus(name)
    for raw in inputs:
        read_once(name, raw, watch)  # what is imported late, or evaluates annotations of the source, does so now
    gc.collect()
    gc.freeze()  # so that collections do not search all modules again and again
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak of importing is not one of reading
    found: dict[str, Path] = {}
    first = peak = peak_bytes()
    start, cpu, count = time.monotonic(), time.process_time(), 0
    while count < runs and time.monotonic() - start < seconds:
        raw = mutate(source, inputs)
        problem = read_once(name, raw, watch)
        count += 1
        if (now := peak_bytes()) - peak > MAX_MEMORY_BYTES:
            problem, peak = problem or f"memory: {(now - peak) >> 20} MiB more", now
        if problem and problem[:40] not in found:
            found[problem[:40]] = keep(name, raw)
            write(f"{name}: {problem}: {found[problem[:40]]}")
        if count % PROGRESS_INPUTS == 0:
            write(f"{name}: {count} inputs so far, {time.process_time() - cpu:.0f} s of processor time")
    growth = peak_bytes() - first
    write(f"{name}: {count} inputs, {len(found)} findings, {growth >> 20} MiB more, seed {seed}, "
          f"{time.process_time() - cpu:.0f} s of processor time")  # fmt: skip
    return len(found)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fuzz_guided(name: str, seconds: float, runs: int, seed: int) -> None:
    """Let atheris choose the inputs by the coverage that they add; it ends the process."""
    import atheris

    stop = time.monotonic() + seconds
    with atheris.instrument_imports(include=["counterpoint", "json", "yaml"]):
        from tests.fuzz import readers  # noqa: F401 - instrumented while it is imported
    watch, new = Watch(), CORPUS.parent / "new" / name.replace(" ", "_")
    new.mkdir(parents=True, exist_ok=True)
    for index, raw in enumerate(corpus(name)):
        read_once(name, raw, watch)
        (new / f"example-{index}").write_bytes(raw)

    def read(raw: bytes) -> None:
        problem = read_once(name, raw, watch)
        if problem:
            keep(name, raw)
            raise RuntimeError(problem)

    options = [f"-max_total_time={max(1, int(stop - time.monotonic()))}", f"-max_len={MAX_INPUT_BYTES}", f"-seed={seed or 1}", "-timeout=10",
               "-rss_limit_mb=4096", "-print_final_stats=1", f"-runs={runs if runs < sys.maxsize else -1}"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(new)], read)
    atheris.Fuzz()


def main() -> int:
    """Fuzz all readers, each in a process of its own, for the same share of the time."""
    from tests.fuzz.readers import READERS

    parser = argparse.ArgumentParser()
    parser.add_argument("--reader", choices=READERS)
    parser.add_argument("--seconds", type=float, help="600 if there is no --runs")
    parser.add_argument("--runs", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    given = parser.parse_args()
    if given.seconds is None:
        given.seconds = 600.0 if given.runs == sys.maxsize else float("inf")
    names = [given.reader] if given.reader else list(READERS)
    is_guided = not given.plain and importlib.util.find_spec("atheris") is not None
    if given.reader and not is_guided:
        return fuzz(given.reader, given.seconds, given.runs, given.seed)
    codes = []
    for name in names:
        call = "fuzz_guided" if is_guided else "fuzz"
        code = f"import sys; from tests.fuzz.fuzz import {call}; " \
               f"sys.exit({call}({name!r}, {given.seconds / len(names)}, {given.runs}, {given.seed}))"  # fmt: skip
        codes.append(subprocess.run([sys.executable, "-c", code], check=False).returncode)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
