"""RPC servers of a job on one host: prints the port that other hosts can reach."""

import sys

import torch

from counterpoint.rpc.address import TcpAddress, UnixAddress
from counterpoint.rpc.client import RpcClient
from counterpoint.rpc.event_loop import EventLoop
from counterpoint.rpc.frame import RpcMessage
from counterpoint.rpc.handshake import JobCredentials
from counterpoint.rpc.job_key import new_key
from counterpoint.rpc.listener import listen, request_handler

secret = JobCredentials(new_key())
with EventLoop() as loop:
    echo = request_handler(lambda message: RpcMessage("echo", message.fields, message.tensors))
    outside = listen(loop, TcpAddress(sys.argv[1], 0), secret, echo)
    inside = listen(loop, TcpAddress("127.0.0.1", 0), secret, echo)
    keyless = listen(loop, UnixAddress("lab"), JobCredentials(None), echo)
    clients = [
        *(RpcClient(loop, each.address, secret) for each in (outside, inside)),
        RpcClient(loop, keyless.address, JobCredentials(None)),
    ]
    for client in clients:
        client.request(RpcMessage("ask", {}, [torch.ones(1000)])).wait(10.0)
    sys.stdout.write(f"ready {str(outside.address).rpartition(':')[2]}\n")
    sys.stdout.flush()
    loop.wait_for(lambda: False, 120.0, "the end of the scan")
