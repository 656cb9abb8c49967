"""Backend ``counterpoint`` of ``torch.distributed``: a process group on a fabric, so that unchanged programs run on it.

``process_group.py`` has torch's methods; ``collectives.py`` maps each collective and reduction to the fabric's,
``work.py`` is torch's handle of a started one, ``p2p.py`` sends and receives messages concurrently, and
``ddp_buckets.py`` moves DDP's buckets into shared memory.
"""
