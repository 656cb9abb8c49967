"""The probe measures the links between hosts, using the ranks only."""

import json
import sys

import pytest

from benchmarks.lab import Lab
from counterpoint.world.cluster_file import parse_cluster

pytestmark = [pytest.mark.process, pytest.mark.slow]

PROBE = (sys.executable, "-m", "counterpoint", "probe", "--json")


def test_two_hosts_have_two_levels_and_share_a_card_of_its_rate(permitted):
    with Lab(hosts=2, rate="100mbit") as lab:
        first, *others = [one.text() for one in lab.run_ranks(PROBE, per_host=2, deadline_s=100)]
    assert set(others) == {""}
    cluster = parse_cluster(json.loads(first)["cluster"])
    inside, outside = cluster.levels
    assert [(level.name, level.count) for level in cluster.levels] == [("host", 2), ("network", 2)]
    assert 0.8 * 12.5e6 < outside.link.bytes_per_s < 1.05 * 12.5e6
    assert outside.is_shared
    assert inside.link.bytes_per_s > 2 * outside.link.bytes_per_s
