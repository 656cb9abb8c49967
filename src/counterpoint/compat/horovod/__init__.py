"""Horovod's PyTorch API: its scripts run after changing only their import.

``torch.py`` is the public API. ``world.py`` has the state of this process, ``collectives.py`` starts operations,
``handles.py`` waits for them, ``join.py`` lets ranks without more data take part with zeros, and ``optimizer.py`` is
``DistributedOptimizer``.
"""
