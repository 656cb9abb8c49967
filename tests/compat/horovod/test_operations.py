"""Operations of Horovod's face give what Horovod's documentation says, on every transport between processes."""

import pytest

from tests.compat.horovod.operations import EXPECTED, SCENES
from tests.compat.horovod.players import once_on_ranks, plain

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("num_ranks", "transport"), [(2, "auto"), (3, "auto"), (2, "gloo")])
@pytest.mark.parametrize(("scene", "expected"), list(zip(SCENES, EXPECTED, strict=True)), ids=lambda it: it.__name__)
def test_an_operation_gives_what_one_rank_would_compute(scene, expected, num_ranks, transport):
    for rank, found in enumerate(once_on_ranks(SCENES, num_ranks, transport)):
        assert found[scene.__name__] == plain(expected(rank, num_ranks))
