"""64 MiB to another process: by RPC with four transports, by TLS and by a plain socket, alternately."""

import contextlib
import datetime
import os
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from counterpoint.rpc.address import parse_address
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey
from counterpoint.testing.claims import BenchmarkOptions, BenchmarkResult

ROUNDS, NUM_BYTES, DEADLINE_S = 12, 64 << 20, 60.0
TRANSPORTS = ("tcp, key", "unix, key", "unix, no key")  # without a key, TCP is refused
BARS = (("tcp, key", "tls 1.3", 1.5), ("unix, key", "tcp, key", 2.0))


def make_certificate():
    """Return a key and a self-signed certificate in PEM format."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    day = datetime.timedelta(days=1)
    signed = made.not_valid_before(now - day).not_valid_after(now + day).sign(key, hashes.SHA256())
    shape = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*shape) + signed.public_bytes(serialization.Encoding.PEM)


@contextlib.contextmanager
def start_server(num_lines, given, *words):
    """Start the other end and yield the first lines it prints; kill it at the end of the block."""
    command = [sys.executable, str(Path(__file__).with_name("peer.py")), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        started.stdin.write(given)
        started.stdin.close()
        try:
            yield [started.stdout.readline().decode().strip() for _ in range(num_lines)]
        finally:
            started.kill()


def open_sockets(opened):
    """Yield sockets by name, connected to processes that receive bytes."""
    pem = make_certificate()
    for name, given in (("tls 1.3", pem), ("plain tcp", b"")):
        (port,) = opened.enter_context(start_server(1, given, "tls" if given else "plain"))
        plain = opened.enter_context(socket.create_connection(("127.0.0.1", int(port))))
        if given:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=pem[pem.index(b"-----BEGIN CERT") :].decode())
            context.check_hostname = False
            plain = opened.enter_context(context.wrap_socket(plain))
        yield name, plain


def open_clients(opened):
    """Yield clients by name, connected to a process that replies to messages."""
    key = JobKey(secrets.token_bytes(32))
    given = opened.enter_context(
        start_server(len(TRANSPORTS), key.secret, "messages", "tcp:127.0.0.1:0", f"unix:bench-{os.getpid()}")
    )
    loop = opened.enter_context(EventLoop())
    for name, place in zip(TRANSPORTS, given, strict=True):
        yield (
            name,
            opened.enter_context(RpcClient(loop, parse_address(place), JobCredentials(None if "no" in name else key))),
        )


@contextlib.contextmanager
def make_senders():
    """Yield functions by name that send the tensor once."""
    tensor = torch.ones(NUM_BYTES // 4)
    message, raw = RpcMessage("push", {}, [tensor]), memoryview(tensor.numpy()).cast("B")

    def by_socket(plain):
        plain.sendall(raw)
        assert plain.recv(1) == b"."

    with contextlib.ExitStack() as opened:
        yield {
            **{
                name: lambda client=client: client.request(message).wait(DEADLINE_S)
                for name, client in open_clients(opened)
            },
            **{name: lambda plain=plain: by_socket(plain) for name, plain in open_sockets(opened)},
        }


def measure(options: BenchmarkOptions) -> BenchmarkResult:
    torch.set_num_threads(1)
    num_rounds = options.num_rounds(ROUNDS)
    with make_senders() as senders:
        seconds = {name: [] for name in senders}
        for turn in range(num_rounds + 2):
            options.report_progress(f"round {turn}")
            for name, send in senders.items():
                began = time.perf_counter()
                send()
                seconds[name].append(time.perf_counter() - began)
    speeds = {name: [NUM_BYTES / one / 2**30 for one in found[2:]] for name, found in seconds.items()}
    rows = [
        (name, f"{statistics.median(found):.2f}", f"{min(found):.2f} to {max(found):.2f}")
        for name, found in speeds.items()
    ]
    missed = []
    for name, other, bar in BARS:
        ratio = statistics.median(a / b for a, b in zip(speeds[name], speeds[other], strict=True))
        rows.append((f"{name} / {other}", f"{ratio:.2f}", f"at least {bar}"))
        if not ratio >= bar:
            missed.append(f"{name} carries {ratio:.2f} times what {other} does; at least {bar} required")
    return BenchmarkResult(("transport", "GiB/s", "spread"), tuple(rows), tuple(missed), {"gib_per_s": speeds})
