"""Only the stages that need samples read them: the first for its inputs, the last for its labels."""

from collections import Counter

import pytest

from counterpoint.data.fetch import NUM_COMPARED_SAMPLES
from tests.process import read_counts as reading
from tests.process.forked_ranks import run_forked

pytestmark = pytest.mark.process
EVERYTHING = Counter(dict.fromkeys(range(12), 3))
READERS = {
    "gpipe(3)": (0, 2),
    "pipeline(3)": (0, 2),
    "interleaved(3)": (0, 2),
    "zero_bubble(3)": (0, 2),
    "zero_bubble(3, chunks_per_stage=2)": (0,),  # whose first stage has the last chunk, too
    "pipedream(3)": (0, 2),
    "pipedream_2bw(3)": (0, 2),
}


@pytest.fixture(scope="module")
def counts_by_rank():
    return run_forked(reading.count_reads, ranks=3, args=[list(READERS)])


@pytest.mark.long
@pytest.mark.parametrize("strategy", READERS)
def test_stages_in_the_middle_read_no_sample_and_the_ends_each_one_once(counts_by_rank, strategy):
    """All ranks look at some samples, twice, to see that they were given the same dataset."""
    built, trained, measured = zip(*(one[list(READERS).index(strategy)] for one in counts_by_rank), strict=True)
    looked_at = Counter(trained[1])
    assert len(looked_at) <= NUM_COMPARED_SAMPLES
    assert len(set(measured[1])) <= NUM_COMPARED_SAMPLES
    for rank in range(3):
        is_reader = rank in READERS[strategy]
        assert Counter(trained[rank]) - looked_at == (EVERYTHING if is_reader else Counter())
        assert Counter(measured[rank]) - Counter(measured[1]) == Counter(range(10) if is_reader else ())
        assert len(built[rank]) <= 3 or strategy == "pipedream(3)", "one microbatch, by which the model is traced"


def test_replicas_of_a_stage_read_their_own_microbatches():
    """The first stage has two, which take turns; the last one has the labels of all."""
    counts_by_rank = run_forked(reading.count_reads, ranks=3, args=[["pipeline(2, replicas=(2,1))"]])
    first, second, last = (Counter(one[0][1]) for one in counts_by_rank)
    looked_at = (last - EVERYTHING) + Counter()
    assert len(looked_at) <= NUM_COMPARED_SAMPLES
    assert (first - looked_at) + (second - looked_at) == EVERYTHING
    assert (first - looked_at).total() == 18
