"""The fabric moves bytes between ranks: messages, groups, collectives, deadlines, and the errors that name who failed.

It knows nothing of programs and strategies; the runtime tells it what to move. ``fabric.py`` says what a rank may ask
for, ``frames.py`` and ``fingerprint.py`` what travels in front of every byte. These transports answer:

* ``local`` (:class:`~counterpoint.fabric.local.LocalWorld`): all ranks in this process as threads that pass one
  baton, so that a distributed run is an ordinary deterministic call;
* ``shm`` and ``gloo`` (:func:`~counterpoint.fabric.rendezvous.connect`): one process per rank, joined by shared memory
  where all are on one host, by sockets elsewhere; ``hosts`` joins both where several hosts have several ranks.

On all, ranks that disagree all get the same :class:`~counterpoint.errors.PeerError` before anything is added up, and
no wait is without an end.
"""

from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.rendezvous import Address, connect

__all__ = ["Address", "Fabric", "LocalWorld", "Work", "connect"]
