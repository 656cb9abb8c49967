"""Transport between several hosts: shared memory among the ranks of each, sockets between them, joined by plan.

``transport.py`` is the fabric; ``layout.py`` says where the members of a group are, ``stages.py`` lets the parts of one
collective follow each other while their rank computes, ``collectives.py`` says which parts each collective has.
"""
