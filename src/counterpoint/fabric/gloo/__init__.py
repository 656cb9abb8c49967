"""Transport ``gloo``: one process per rank, connected by torch's ``ProcessGroupGloo`` over sockets.

``transport.py`` is the fabric; ``connections.py`` opens and aborts gloo process groups, ``collective_queue.py`` lets
members compare a collective before it starts, ``ops.py`` starts gloo's collectives on tensors, and ``p2p.py`` sends
messages. torch's default process group is neither used nor changed.
"""
