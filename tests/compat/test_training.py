"""Programs of torch train on our backend as they do on gloo, unchanged."""

import pytest

from tests.compat.process_groups import OVER_GLOO, once_on_ranks
from tests.compat.training_programs import PROGRAMS, run_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "counterpoint"), (3, "counterpoint"), (2, OVER_GLOO)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_comes_to_the_losses_and_parameters_of_gloo(program, num_ranks, backend):
    name = program.__name__  # gloo rounds the sums of halves twice among three ranks, we once
    ours, theirs = (once_on_ranks(run_all, num_ranks, which) for which in (backend, "gloo"))
    for (losses, params), (their_losses, their_params) in zip(
        [rank[name] for rank in ours], [rank[name] for rank in theirs], strict=True
    ):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        for own, other in zip(params, their_params, strict=True):
            assert own == pytest.approx(other, rel=1e-4, abs=1e-6 if name != "ddp_on_half" else 1e-4)
