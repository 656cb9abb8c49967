"""Transport ``shm``: processes of one host whose collectives work in shared memory.

``transport.py`` is the fabric; ``native.py`` the bindings of the native library (sources in ``native/``),
``segments.py`` anonymous shared memory files, ``memory.py`` what the ranks map, ``p2p.py`` messages, and
``collectives.py`` groups and prepared requests.
"""
