"""The other end: ``peer.py MODE`` serves messages or receives bytes; standard input has the key or certificate."""

import socket
import ssl
import sys
import tempfile

from counterpoint.rpc.address import parse_address
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import JobKey
from counterpoint.rpc.listener import listen, request_handler

NUM_BYTES = 64 << 20


def print_line(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def serve_messages(places, key):
    """Serve at each address with the key, and at UNIX sockets without one, too."""
    answer = RpcMessage("taken")
    with EventLoop() as loop:
        for place in places:
            is_unix = place.startswith("unix")
            for credentials in (JobCredentials(key), *[JobCredentials(None)] * is_unix):
                name = f"{place}-{bool(credentials.key)}" if is_unix else place
                print_line(listen(loop, parse_address(name), credentials, request_handler(lambda _: answer)).address)
        loop.wait_for(lambda: False, 600.0, "the end")


def receive_bytes(context):
    """Receive 64 MiB repeatedly, with a short reply each."""
    room = memoryview(bytearray(NUM_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print_line(listener.getsockname()[1])
        peer, _ = listener.accept()
    with context.wrap_socket(peer, server_side=True) if context else peer as plain:
        while fill_buffer(room, plain):
            plain.sendall(b".")


def fill_buffer(room, plain):
    """Return whether the buffer was filled before the end of the stream."""
    while room:
        if not (num_bytes := plain.recv_into(room)):
            return False
        room = room[num_bytes:]
    return True


def tls_context(pem):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def main(what, *places):
    given = sys.stdin.buffer.read()
    match what:
        case "messages":
            serve_messages(places, JobKey(given))
        case "tls":
            receive_bytes(tls_context(given))
        case "plain":
            receive_bytes(None)


main(*sys.argv[1:])
