"""Scan all TCP ports of a host: ``scan_ports.py HOST`` prints open ports, and what they answered."""

import contextlib
import errno
import json
import selectors
import socket
import sys

AT_ONCE, PATIENCE_S, SILENCE_S = 500, 5.0, 0.5
HELLO = b"CPWS\1\1\0\0" + bytes(32)
REQUESTS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: job\r\n\r\n" * 4,
    "tls": b"\x16\x03\x01\x02\x00" + bytes(512),
    "noise": bytes(range(256)) * 4,
    "half a greeting": HELLO[:20],
    "a greeting": HELLO,
    "a greeting without a key": b"CPWS\1\0\0\0" + bytes(32),
    "a greeting and a wrong proof": HELLO + bytes(32),
    "a greeting, a wrong proof and a frame": HELLO + bytes(32) + b"CPWL" + bytes(4096),
}


def open_ports(host):
    """Ports that accept a connection, or do not refuse it."""
    result: list[int] = []
    waiting, ports = selectors.DefaultSelector(), iter(range(1, 1 << 16))
    while True:
        for port in ports:
            plain = socket.socket()
            plain.setblocking(False)
            if plain.connect_ex((host, port)) not in {0, errno.EINPROGRESS}:
                plain.close()
                continue
            waiting.register(plain, selectors.EVENT_WRITE, (plain, port))
            if len(waiting.get_map()) >= AT_ONCE:
                break
        if not waiting.get_map():
            return sorted(result)
        ready = waiting.select(PATIENCE_S)
        for key, _ in ready or [(key, 0) for key in list(waiting.get_map().values())]:
            plain, port = key.data
            if not ready or plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                result.append(port)
            waiting.unregister(plain)
            plain.close()


def response(host, port, request):
    """What a port answers to somebody who says this, and then is silent."""
    answer = b""
    with socket.create_connection((host, port), PATIENCE_S) as plain:
        plain.settimeout(SILENCE_S)
        with contextlib.suppress(OSError):
            plain.sendall(request)
            while chunk := plain.recv(1 << 16):
                answer += chunk
    return answer.hex()


host = sys.argv[1]
answers = {
    port: {name: response(host, port, request) for name, request in REQUESTS.items()} for port in open_ports(host)
}
sys.stdout.write(json.dumps(answers) + "\n")
