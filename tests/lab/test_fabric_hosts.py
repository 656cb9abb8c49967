"""Ranks of two hosts detect their placement, and send between hosts what one rank of each would."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab

RANKS = Path(__file__).parents[2] / "benchmarks" / "hosts" / "ranks.py"


@pytest.mark.slow
def test_two_ranks_of_a_host_send_as_much_as_one_rank():
    if reason := Lab.unavailable_reason():
        pytest.skip(reason)
    with Lab(hosts=2, rate="1gbit") as lab:
        ended = lab.run_ranks([sys.executable, str(RANKS), "sums", "4", "1"], per_host=2, deadline_s=60)
    result = json.loads(ended[0].text().splitlines()[-1])
    sent = {name: turns[0][1] / (4 << 20) for name, turns in result.items() if turns}
    assert 1.0 <= sent["connect"] < 1.05
    assert 1.0 <= sent["hierarchical"] < 1.05
    assert 1.5 <= sent["ring in host order"] < 1.58
    assert 3.0 <= sent["ring interleaved"] < 3.15
