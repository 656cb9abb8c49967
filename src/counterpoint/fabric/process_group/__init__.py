"""Transport ``process_group``: tensors move over c10d process groups, everything else over a fabric of the hosts.

``transport.py`` has the fabric, ``collectives.py`` its collectives in terms of a process group's, ``order.py`` what
replaces the comparison of every collective, ``watchdog.py`` deadlines.
"""
