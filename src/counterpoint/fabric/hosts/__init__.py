"""Transport for several hosts: shared memory within each host, sockets between hosts.

``transport.py`` is the fabric, ``layout.py`` the placement of a group's members, ``collectives.py`` the stages of each
collective and the queue that runs them in the background.
"""
