"""Network peer for tests of links: ``network_peer.py FUNCTION ...``, with one of the functions below."""

import contextlib
import socket
import statistics
import sys
import time

PORT = 5000
PATIENCE_S = 20.0
RCVBUF_FORCE = 33  # SO_RCVBUFFORCE


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def take(port=PORT):
    """Print ready, take one connection to its end, print its bytes and its bytes per second."""
    with socket.create_server(("", int(port))) as server:
        say("ready")
        connection, _ = server.accept()
        with connection:
            began, total = time.perf_counter(), 0
            while chunk := connection.recv(1 << 20):
                total += len(chunk)
    say(total, total / (time.perf_counter() - began))


def give(host, num_bytes, port=PORT):
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(bytes(int(num_bytes)))


def echo():
    with socket.create_server(("", PORT)) as server:
        say("ready")
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while chunk := connection.recv(1 << 16):
                    connection.sendall(chunk)


def round_trip(host):
    """Print the median of 9 round trips, in seconds."""
    times = []
    with socket.create_connection((host, PORT), PATIENCE_S) as connection:
        for _ in range(9):
            began = time.perf_counter()
            connection.sendall(b".")
            assert connection.recv(1) == b"."
            times.append(time.perf_counter() - began)
    say(statistics.median(times))


def reach(host):
    """Print how an attempt to reach an echo ends."""
    try:
        with socket.create_connection((host, PORT), 1) as connection:
            connection.sendall(b".")
            say("reached" if connection.recv(1) else "ended")
    except OSError as error:
        say(type(error).__name__)


def count(patience_s=PATIENCE_S):
    """Print how many datagrams come before the last one, or before a silence."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        mine.setsockopt(socket.SOL_SOCKET, RCVBUF_FORCE, 1 << 23)  # a busy machine must not lose any on its own
        mine.bind(("", PORT))
        mine.settimeout(float(patience_s))
        say("ready")
        num_received = 0
        with contextlib.suppress(TimeoutError):
            while mine.recv(100) != b"last":
                num_received += 1
    say(num_received)


def throw(host, number):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mine:
        for datagram in [b"datagram"] * int(number) + [b"last"] * 20:
            mine.sendto(datagram, (host, PORT))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
