"""A job of a parameter server on one host of the lab: it prints at which port it listens."""

import sys

import torch

from counterpoint.server.wire.client import Client
from counterpoint.server.wire.greeting import Secret
from counterpoint.server.wire.key import new_key
from counterpoint.server.wire.letter import Letter
from counterpoint.server.wire.loop import Loop
from counterpoint.server.wire.place import TcpPlace, UnixPlace
from counterpoint.server.wire.server import replying, serve

secret = Secret(new_key())
with Loop() as loop:
    echo = replying(lambda letter: Letter("echo", letter.fields, letter.tensors))
    outside = serve(loop, TcpPlace(sys.argv[1], 0), secret, echo)
    inside = [serve(loop, place, Secret(None), echo) for place in (TcpPlace("127.0.0.1", 0), UnixPlace("lab"))]
    clients = [Client(loop, outside.place, secret), *(Client(loop, each.place, Secret(None)) for each in inside)]
    for client in clients:
        client.ask(Letter("ask", {}, [torch.ones(1000)])).answer(10.0)
    sys.stdout.write(f"ready {str(outside.place).rpartition(':')[2]}\n")
    sys.stdout.flush()
    loop.wait_for(lambda: False, 120.0, "the end of the scan")
