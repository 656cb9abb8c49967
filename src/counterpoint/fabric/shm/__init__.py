"""Transport ``shm``: processes of one host whose collectives work in memory that all of them see.

``transport.py`` is the fabric, ``rank.py`` what of it has nothing to do with collectives; ``native.py`` the library
under it (its sources are in ``native/``), ``segments.py`` files without a name, ``memory.py`` what ranks share,
``mail.py`` messages, ``news.py`` why a rank cannot go on, ``groups.py`` who adds up together, ``recipes.py``
collectives made ready, and ``work.py`` those that have been started.
"""
