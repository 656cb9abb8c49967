"""Transport ``shm``: processes of one host whose collectives work in memory that all of them see.

``transport.py`` is the fabric; ``native.py`` the library under it (its sources are in ``native/``), ``segments.py``
files without a name, ``memory.py`` what ranks share, ``mail.py`` messages, ``recipes.py`` collectives made ready.
"""
