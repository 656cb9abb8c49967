"""Transport ``gloo``: one process per rank, connected by torch's ProcessGroupGloo over sockets."""
