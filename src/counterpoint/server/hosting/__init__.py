"""Coordinator, servers and workers as real processes: the state machines of this room bound to wire, disk and clock."""

from counterpoint.server.hosting.contact import Contact, read_contact, write_contact
from counterpoint.server.hosting.joining import join

__all__ = ["Contact", "join", "read_contact", "write_contact"]
