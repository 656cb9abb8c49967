"""Published tables and our own figures: which agree, which miss and why, and the page."""

import pytest

from benchmarks.published.memory import peak_gb, states_gb
from benchmarks.published.networks import bert_large, inception_v3, num_params, resnet, vgg16
from benchmarks.published.page import TABLES, render_page
from benchmarks.published.table import FigureRow, FigureTable

pytestmark = pytest.mark.timeout(240)  # a few seconds where nothing else runs


@pytest.mark.long(quick=["volume_table", "all_reduce_table", "communication_table", "tensorflow_table"])
@pytest.mark.parametrize("index", range(len(TABLES)), ids=[build.__name__ for build in TABLES])
def test_every_published_figure_agrees_or_has_a_reason(index):
    assert TABLES[index]().find_errors() == []


@pytest.mark.long
def test_the_page_says_what_the_code_does(golden):
    golden("../../docs/explanation/published.md", render_page())


@pytest.mark.parametrize(("level", "published"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_leaves_so_many_gigabytes_on_each_of_64_ranks(level, published):
    """With 7.5 billion parameters and Adam in mixed precision, 16 bytes a parameter."""
    assert round(states_gb(level, 64, 7.5e9), 1) == published


def test_a_program_holds_one_block_in_addition_to_its_states():
    """Level 3 has one block's whole weights and its gradient, in addition to the rank's own shards."""
    whole = 7.5 / 8 * (2 + 2 * (1 - 1 / 64))  # the gradient of the block, of which no shard exists yet
    assert peak_gb(3, 64, 7.5e9, 8) == pytest.approx(states_gb(3, 64, 7.5e9) + whole, abs=1e-6)


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        (vgg16(), 138_357_544),
        (resnet(3, 4, 6, 3), 25_557_032),
        (resnet(3, 4, 23, 3), 44_549_160),
        (resnet(3, 8, 36, 3), 60_192_808),
        (inception_v3(), 23_834_568),
        (bert_large(), 335_141_888),
    ],
)
def test_a_network_has_as_many_parameters_as_published(layers, count):
    assert num_params(layers) == count


def test_a_figure_that_misses_needs_a_reason_and_one_that_agrees_none():
    rows = (FigureRow(("x",), "1.0", 1.3), FigureRow(("y",), "1.0", 1.05, "a"), FigureRow(("z",), "1.0", 1.3, "b"))
    table = FigureTable("T", "", "", ("",), rows, within=0.1, reasons=(("b", "so"), ("c", "unused")))
    assert table.find_errors() == [
        "T: x: 1.0 published, 1.30 simulated, without a reason ''",
        "T: y: 1.0 published, 1.05 simulated, but has the reason 'a'",
        "T: no row has the reason 'c'",
    ]
