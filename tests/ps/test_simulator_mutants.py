"""What the simulated worlds would find, if it were there."""

import pytest

from counterpoint.testing.ps_simulator.simulate import simulate
from tests.ps.simulator_mutants import MUTANTS

FOUND = {mutant.__name__: (mutant, seed) for mutant, seed in MUTANTS.items()}


def finds(seeds):
    """Whether one of the worlds breaks what must hold."""
    return any(simulate(seed).violations for seed in seeds)


@pytest.mark.long(
    quick=[
        "goes_on_behind_a_torn_line",
        "answers_before_the_backup_has_it",
        "sends_before_it_writes",
        "computes_a_slice_from_two_steps",
        "keeps_entries_in_the_order_they_come",
    ]
)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name, monkeypatch):
    mutant, seed = FOUND[name]
    mutant(monkeypatch)
    assert finds(range(seed, seed + 30))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found_within_ten_thousand_seeds(name, monkeypatch):
    FOUND[name][0](monkeypatch)
    assert finds(range(10_000))
