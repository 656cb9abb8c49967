import pytest

from counterpoint.world.cluster import Cluster, Level, Link

MEMORY, CARD, TRUNK = Link(5e-6, 10e9), Link(50e-6, 125e6), Link(1e-3, 1e6)
HOSTS = Cluster(levels=(Level("host", 2, MEMORY), Level("rack", 3, CARD, is_shared=True), Level("site", 2, TRUNK)))


@pytest.mark.parametrize(
    ("ranks", "link"), [((0, 1), MEMORY), ((1, 2), CARD), ((0, 5), CARD), ((5, 6), TRUNK), ((4, 5), MEMORY)]
)
def test_ranks_are_joined_by_the_innermost_level_that_holds_them(ranks, link):
    assert HOSTS.link_among(ranks) == link


def test_a_rank_is_on_the_host_whose_seats_hold_it():
    assert [HOSTS.host(rank) for rank in range(5)] == [0, 0, 1, 1, 2]


def test_without_levels_every_pair_has_the_same_link():
    assert Cluster(link=CARD).link_among((0, 7)) == CARD
    assert (Cluster().host(7), Cluster().num_ranks, HOSTS.num_ranks) == (0, 0, 12)


def test_more_ranks_than_listed_share_the_total_of_the_last_entry():
    crowded = Cluster(compute_contention=(1.0, 0.9))
    assert [crowded.contended_compute_fraction(count) for count in (1, 2, 3, 4)] == pytest.approx([1.0, 0.9, 0.6, 0.45])
    assert Cluster().contended_compute_fraction(8) == 1.0


def test_one_that_computes_half_of_the_time_is_half_in_the_way():
    crowded = Cluster(compute_contention=(1.0, 0.8, 0.5))
    assert [crowded.contended_compute_fraction(count) for count in (0.5, 1.5, 2.5, 3.5)] == pytest.approx(
        [1.0, 0.9, 0.65, 1.5 / 3.5]
    )
