"""Authenticated message transport between processes: frames of JSON and tensors over sockets and shared memory."""
