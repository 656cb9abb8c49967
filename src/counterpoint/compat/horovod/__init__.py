"""Horovod's PyTorch face on Counterpoint's fabric: its scripts run when their import is changed, and nothing else.

``torch.py`` is the face. Behind it, ``world.py`` holds the one connection of this process, ``collectives.py`` starts
operations, ``handles.py`` waits for them, ``joining.py`` lets ranks that have run out of data follow the others,
``gradients.py`` and ``optimizer.py`` are ``DistributedOptimizer``.
"""
