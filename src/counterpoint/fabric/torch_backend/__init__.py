"""A process group of torch over a fabric, so that programs written for torch.distributed run on it unchanged.

``group.py`` has torch's words for every operation, ``collectives.py`` says each in the fabric's words,
``reductions.py`` what torch adds up and the fabric does not, ``work.py`` what an operation that goes on looks like to
torch, ``messages.py`` lets messages pass in both directions at once, and ``buckets.py`` spares DDP's buckets a copy.
"""
