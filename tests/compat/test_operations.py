"""Operations of torch.distributed give on our backend what they give on gloo."""

import pytest

from tests.compat.operation_scenarios import NAMES, no_gloo_has, run_all
from tests.compat.process_groups import OVER_GLOO, on_ranks, once_on_ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.parametrize("backend", ["counterpoint", OVER_GLOO])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_gives_what_it_gives_on_gloo(name, num_ranks, backend):
    ours = once_on_ranks(run_all, num_ranks, backend)
    theirs = once_on_ranks(run_all, num_ranks, "gloo")
    assert [rank[name] for rank in ours] == [rank[name] for rank in theirs]


def test_means_and_reductions_of_flags_and_of_strided_tensors_are_right_where_gloo_is_not():
    either, both = [False, True, True], [False, False, True]
    flags = {"SUM": either, "MAX": either, "MIN": both, "PRODUCT": both}
    strided = [[[3.0, own, 3.0, own]] * 2 for own in (1.0, 2.0)]
    assert on_ranks(no_gloo_has, 2) == [([0.5] * 3, [0, 3, -3], flags, whole) for whole in strided]
