"""The far side: ``far.py WHAT`` serves letters or takes bytes, with the key or the certificate that it reads."""

import socket
import ssl
import sys
import tempfile

from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.key import JobKey
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import parse_place
from counterpoint.server.wire.server import replying, serve

NUM_BYTES = 64 << 20


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def serve_letters(places, key):
    """Serve at each place, with the key and without."""
    answer = Letter("taken")
    with Loop() as loop:
        for place in places:
            for secret in (Secret(key), Secret(None)):
                name = f"{place}-{bool(secret.key)}" if place.startswith("unix") else place
                say(serve(loop, parse_place(name), secret, replying(lambda _: answer)).place)
        loop.wait_for(lambda: False, 600.0, "the end")


def take_bytes(context):
    """Take 64 MiB again and again, and say so."""
    room = memoryview(bytearray(NUM_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say(listener.getsockname()[1])
        peer, _ = listener.accept()
    with context.wrap_socket(peer, server_side=True) if context else peer as plain:
        while fill(room, plain):
            plain.sendall(b".")


def fill(room, plain):
    """Tell whether the room is full of what came before the end."""
    while room:
        if not (num_bytes := plain.recv_into(room)):
            return False
        room = room[num_bytes:]
    return True


def tls(pem):
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
        case "letters":
            serve_letters(places, JobKey(given))
        case "tls":
            take_bytes(tls(given))
        case "plain":
            take_bytes(None)


main(*sys.argv[1:])
