"""Communication between ranks: messages, groups, collectives, timeouts, and errors that name the rank at fault.

It knows nothing of programs and strategies; the runtime tells it what to transfer. ``fabric.py`` is the interface,
``frames.py`` the wire format, ``fingerprint.py`` the signatures of collectives. The transports:

* ``local`` (:class:`~counterpoint.fabric.local.LocalWorld`): all ranks are threads of this process, scheduled
  deterministically;
* ``shm``, ``gloo``, ``mpi`` (:func:`~counterpoint.fabric.rendezvous.connect`): one process per rank, connected by
  shared memory on one host, by sockets, or by MPI; ``hosts`` combines shared memory within hosts with sockets between
  them;
* ``process_group``: tensors move over c10d process groups, of NCCL or gloo, the rest by another transport.

On all of them, ranks that start different collectives get the same :class:`~counterpoint.errors.PeerError` before any
tensor changes (``process_group``: at the latest at the step's commit), and every wait has a timeout.
"""

from counterpoint.fabric.fabric import Fabric, Work
from counterpoint.fabric.local import LocalWorld
from counterpoint.fabric.rendezvous import Address, connect

__all__ = ["Address", "Fabric", "LocalWorld", "Work", "connect"]
