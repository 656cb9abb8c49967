"""A stranger without the key of a job, who tries what another user of a host, or another host, can try.

``stranger.py UID HOST:PORT,... FOLDER,... PID,...``: drop to this user, attack these ports with every protocol that a job
speaks, and the sockets, folders and processes named; print what was answered and what succeeded as JSON. In ``got`` is
what a stranger must not have: keys that were read or listed, data that was written, descriptors and memory that were
opened. Without a PID the stranger is on another host: it tries ports only.
"""

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - read as the user who can read it
import json
import os
import re
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

from counterpoint.errors import CounterpointError
from counterpoint.fabric.c10d import TCPStore
from counterpoint.fabric.key_value_store import STORE_JOB
from counterpoint.rpc.address import TcpAddress, UnixAddress
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcLimits, RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import new_key

PATIENCE_S, SILENCE_S = 2.0, 0.15
NUM_HALF_OPEN, NUM_SLOW = 40, 20
JOBS = (STORE_JOB, "far")
HELLO = b"CPWS\1\1\0\0" + bytes(32)
REQUESTS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: job\r\n\r\n" * 4,
    "tls": b"\x16\x03\x01\x02\x00" + bytes(512),
    "noise": bytes(range(256)) * 4,
    "store": b"\x00\xce\xf7\x85\x3c\x09\x00\x00\x00\x00" + bytes(64),  # torch's TCPStore: validate, ping
    "gloo": b"".join(number.to_bytes(8, "little") for number in range(64)),
    "half a greeting": HELLO[:20],
    "a greeting": HELLO,
    "a greeting without a key": b"CPWS\1\0\0\0" + bytes(32),
    "a greeting and a wrong proof": HELLO + bytes(32),
    "a greeting, a wrong proof and a frame": HELLO + bytes(32) + b"CPWL" + bytes(4096),
}
TEXTS = re.compile(rb"here/|pid|facts|weight|stopped|count/|@(?:shm|gloo)")


class Stranger:
    """What a stranger has tried, and got."""

    def __init__(self):
        self.num_connected, self.answers, self.got = 0, {}, []

    def attack_port(self, host, port):
        """Say everything to a port, and keep what it answers."""
        place = f"{host}:{port}"
        self.answers[place] = {name: self.exchange((host, port), request).hex() for name, request in REQUESTS.items()}
        self.reflect((host, port))
        self.join(TcpAddress(host, port))
        self.use_torchs_store(host, port)

    def exchange(self, target, request):
        """Return what somebody answers who is told this, and then nothing."""
        answer = b""
        family = socket.AF_UNIX if isinstance(target, bytes) else socket.AF_INET
        with socket.socket(family) as plain, contextlib.suppress(OSError):
            plain.settimeout(PATIENCE_S)
            plain.connect(target)
            self.num_connected += 1
            plain.settimeout(SILENCE_S)
            plain.sendall(request)
            while chunk := plain.recv(1 << 16):
                answer += chunk
        if TEXTS.search(answer):
            self.got.append(f"{target} answers {answer[:100]!r}")
        return answer

    def reflect(self, target):
        """Send a server's own greeting back to it, and its proof of one connection in another."""
        with contextlib.suppress(OSError), socket.create_connection(target, PATIENCE_S) as one:
            one.settimeout(SILENCE_S)
            one.sendall(HELLO)
            greeting = one.recv(len(HELLO))
            one.sendall(greeting[:32])
            refusal = one.recv(1000)
            for again in (greeting + refusal, greeting + greeting[8:], greeting * 8):
                answer = self.exchange(target, again)
                if len(answer) > len(HELLO) + 32 or any(answer[len(HELLO) :]):
                    self.got.append(f"{target} lets in whoever sends its own bytes back: {answer!r}")

    def join(self, address):
        """Speak our own protocol: without a key, with another one, as every kind of member."""
        for key in (None, new_key()):
            for job in JOBS:
                with EventLoop() as loop, contextlib.suppress(CounterpointError, OSError):
                    client = RpcClient(loop, address, JobCredentials(key, job), RpcLimits(handshake_s=0.3))
                    client.wait_open()
                    self.got.append(f"{address} lets a stranger in")
                    for kind, fields in (("get", {"key": "here/0"}), ("set", {"key": "stopped", "value": "MQ=="})):
                        self.got.append(f"{kind}: {client.request(RpcMessage(kind, fields)).wait(1.0)}")

    def use_torchs_store(self, host, port):
        """Read, list and write by torch's own client, which waits for ever where nobody answers."""
        trial = threading.Thread(target=self.try_torchs_store, args=(host, port), daemon=True)
        trial.start()
        trial.join(PATIENCE_S)

    def try_torchs_store(self, host, port):
        """Read, list and write by torch's own client."""
        with contextlib.suppress(Exception):
            store = TCPStore(host, port, None, False, timedelta(seconds=0.5), wait_for_workers=False)
            store.set("stopped", "1: FORGED")
            self.got.append(f"{host}:{port} is an open store: {store.num_keys()} keys, {store.get('stopped')!r}")

    def keep_busy(self, targets):
        """Leave connections half open, and send one byte now and then on others."""
        silent: list[socket.socket] = []
        slow: list[socket.socket] = []
        for target in targets:
            for connections, number in ((silent, NUM_HALF_OPEN), (slow, NUM_SLOW)):
                for _ in range(number):
                    with contextlib.suppress(OSError):
                        connections.append(socket.create_connection(target, PATIENCE_S))
        self.num_connected += len(silent) + len(slow)
        for at in range(len(HELLO)):
            for one in slow:
                with contextlib.suppress(OSError):
                    one.sendall(HELLO[at : at + 1])
            threading.Event().wait(0.05)
        return silent + slow

    def attack_sockets(self):
        """Connect to the UNIX sockets of this network."""
        for name in re.findall(r"@(\S+)", Path("/proc/net/unix").read_text()):
            for request in (b"", HELLO, b"CPWS\1\0\0\0" + bytes(64)):
                self.exchange(b"\0" + name.encode(), request)
            self.join(UnixAddress(name.removeprefix("counterpoint/")))

    def attack_folder(self, folder):
        """List, read, change, create, remove and link what is in a folder that all users share, such as /tmp."""
        for path in folder.rglob("*"):
            self.try_to(f"create a file in {path}", lambda path=path: (path / "stranger").write_text("x"))
            self.try_to(f"put a link into {path}", lambda path=path: (path / "link").symlink_to("/etc/passwd"))
            self.try_to(f"rename {path}", lambda path=path: path.rename(f"{path}.stolen"))
            self.try_to(f"open {path} for writing", lambda path=path: os.close(os.open(path, os.O_WRONLY)))
            self.try_to(f"change {path}", lambda path=path: path.chmod(0o777))
            self.try_to(f"remove {path}", path.unlink)
            self.try_to_read(path)

    def attack_process(self, pid):
        """Read and change a process through /proc and by system calls."""
        process, libc = Path(f"/proc/{pid}"), ctypes.CDLL(None, use_errno=True)
        self.try_to(f"list the descriptors of {pid}", lambda: list((process / "fd").iterdir()))
        for number in range(64):
            self.try_to(f"open descriptor {number} of {pid}", lambda at=number: (process / f"fd/{at}").open("rb"))
            self.try_to(f"map descriptor {number} of {pid}", lambda at=number: (process / f"fd/{at}").open("r+b"))
        for name in ("environ", "mem", "maps", "auxv", "stack", "cwd", "root", "map_files"):
            self.try_to_read(process / name)
        self.try_to(f"trace {pid}", lambda: self.call(libc.ptrace, 16, pid, 0, 0))
        self.try_to(f"signal {pid}", lambda: os.kill(pid, signal.SIGCONT))
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            for number in range(16):
                self.try_to(
                    f"take {number} of {pid}", lambda at=number: self.call(libc.syscall, 438, descriptor, at, 0)
                )
            os.close(descriptor)

    def try_to_read(self, path):
        """Read a file or list a folder; note what is in it."""
        with contextlib.suppress(OSError):
            content = [*path.iterdir()] if path.is_dir() else path.open("rb").read(16)
            if content:
                self.got.append(f"read {content!r} from {path}")

    @staticmethod
    def call(function, *arguments):
        """Call a function of C that returns -1 for an error."""
        if function(*arguments) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    def try_to(self, what, act):
        """Note what succeeds."""
        with contextlib.suppress(OSError):
            act()
            self.got.append(what)


def main(user, targets, folders="", pids=""):
    Stranger().join(TcpAddress("127.0.0.1", 1))  # nobody is there: reads what another user cannot
    os.setgroups([])
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
    stranger = Stranger()
    places = [(host, int(port)) for host, port in (target.rsplit(":", 1) for target in targets.split(",") if target)]
    held = stranger.keep_busy(places)
    for host, port in places:
        stranger.attack_port(host, port)
    for folder in filter(None, folders.split(",")):
        stranger.attack_folder(Path(folder))
    if pids:
        stranger.attack_sockets()
        stranger.attack_folder(Path("/dev/shm"))
        for pid in pids.split(","):
            stranger.attack_process(int(pid))
    for one in held:
        one.close()
    result = {"uid": os.getuid(), "connected": stranger.num_connected, "answers": stranger.answers, "got": stranger.got}
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of torch's client may still wait


if __name__ == "__main__":
    main(*sys.argv[1:])
