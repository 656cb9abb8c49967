"""One rank of torch's gloo: all-reduces a value, and prints its first element and its host."""

import datetime
import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
value = torch.full((int(sys.argv[1]),), dist.get_rank() + 1.0)
dist.all_reduce(value)
sys.stdout.write(f"{value[0].item()} {socket.gethostname()}\n")
dist.destroy_process_group()
