"""An attacker's scripts run as another user of the host; only root can become one."""

import contextlib
import os

import pytest

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@contextlib.contextmanager
def as_user(user):
    """Be another user, and in this user's group only."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
