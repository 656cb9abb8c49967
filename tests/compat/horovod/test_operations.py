"""Operations of Horovod's face give what Horovod's documentation says, on every transport between processes."""

import pytest

from tests.compat.horovod.operation_scenarios import EXPECTED, SCENARIOS
from tests.compat.horovod.rank_runner import once_on_ranks, to_plain

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "auto"), (3, "auto"), (2, "gloo")])
@pytest.mark.parametrize(
    ("scenario", "expected"), list(zip(SCENARIOS, EXPECTED, strict=True)), ids=lambda it: it.__name__
)
def test_an_operation_gives_what_one_rank_would_compute(scenario, expected, num_ranks, transport):
    for rank, result in enumerate(once_on_ranks(SCENARIOS, num_ranks, transport)):
        assert result[scenario.__name__] == to_plain(expected(rank, num_ranks))
