import sys

import numpy as np
import pytest
import torch

from counterpoint.data.digits import Digits, split_digits
from counterpoint.data.fetch import fetch
from counterpoint.data.lines import NUM_ROWS, SourceLines, hash_lines, most_frequent_classes, split_lines
from counterpoint.data.sources import is_held_out, read_sources, select_split
from counterpoint.data.text import Text, split_text
from counterpoint.errors import DataError


@pytest.fixture(scope="module")
def library():
    return read_sources()


@pytest.fixture
def folder(tmp_path):
    """Sixty small files in three packages, and some that are to be left out."""
    for package in ("alpha", "beta", "gamma"):
        (tmp_path / package).mkdir()
        for number in range(20):
            (tmp_path / package / f"m{number}.py").write_text(f"{package}_name = {package}({number})\n" * 9)
    for left_out in ("test/a.py", "alpha/tests/a.py", "site-packages/a.py", "_sysconfigdata_x.py", "a.txt"):
        (tmp_path / left_out).parent.mkdir(exist_ok=True)
        (tmp_path / left_out).write_text("left out")
    (tmp_path / "broken.py").symlink_to(tmp_path / "nowhere.py")
    return tmp_path


def test_tests_installed_packages_and_unreadable_files_are_skipped(folder):
    sources = read_sources(folder)
    assert len(sources) == 60
    assert {source.top_level for source in sources} == {"alpha", "beta", "gamma"}
    assert [source.path for source in sources] == sorted(source.path for source in sources)


def test_the_library_has_megabytes_in_both_parts_and_no_file_in_both(library):
    for one_in in (5, 10):
        train, held_out = (select_split(library, part, one_in) for part in ("train", "held-out"))
        assert not {source.path for source in train} & {source.path for source in held_out}
        assert len(train) + len(held_out) == len(library)
        share = sum(len(source.content) for source in held_out) / sum(len(s.content) for s in library)
        assert 0.5 / one_in < share < 2 / one_in
    assert not [source.path for source in library if "/test/" in source.path or "-packages" in source.path]


def test_which_files_are_held_out_never_changes():
    paths = ("argparse.py", "json/decoder.py", "json/encoder.py", "os.py", "http/client.py")
    assert [path for path in paths if is_held_out(path, 5)] == ["argparse.py", "json/decoder.py"]


def test_no_held_out_text_is_trained_on(folder):
    train, held_out = split_text(context=16, root=folder)
    texts = [part._text.numpy().tobytes() for part in (train, held_out)]
    for source in read_sources(folder):
        assert [source.content in text for text in texts] == [
            not is_held_out(source.path, 10),
            is_held_out(source.path, 10),
        ]


def test_a_window_is_followed_by_its_next_byte_and_then_by_the_next_window(folder):
    text = Text(read_sources(folder), context=8)
    x, y = text.fetch([0, 1])
    assert bytes(x[0].tolist()) == b"alpha_na"
    assert bytes(y[0].tolist()) == b"lpha_nam"
    assert (x.shape, x.dtype, y.dtype) == ((2, 8), torch.int64, torch.int64)
    assert y[0, -1] == x[1, 0]


def test_a_limited_text_is_spread_over_the_whole_of_it(folder):
    sources = read_sources(folder)
    whole, some = Text(sources, context=8), Text(sources, context=8, limit=10)
    wanted = [index * len(whole) // 10 for index in range(10)]
    assert len(some) == 10
    assert torch.equal(some.fetch(range(10))[0], whole.fetch(wanted)[0])
    with pytest.raises(IndexError, match="of 10"):
        some[10]


@pytest.mark.parametrize("make", [lambda s: Text(s, context=8), lambda s: SourceLines(s, ["alpha", "beta"])])
def test_one_sample_many_samples_and_a_second_reading_agree(folder, make):
    one, other = (make(read_sources(folder)) for _ in range(2))
    indices = [0, len(one) - 1, 3]
    many = one.fetch(indices)
    for field, number in ((field, number) for field in range(2) for number in range(3)):
        assert torch.equal(many[field][number], other[indices[number]][field])
    assert [field.shape for field in fetch(one, [])] == [(0, *field.shape[1:]) for field in many]


def test_digits_are_normalized_and_split_once_and_for_all():
    train, held_out = split_digits()
    assert (len(train), len(held_out)) == (1438, 359)
    images, digits = train.fetch(range(1438))
    assert (images.shape, images.dtype, digits.dtype) == ((1438, 1, 8, 8), torch.float32, torch.int64)
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01
    everything = torch.cat([images, held_out.fetch(range(359))[0]])
    assert len(everything.unique(dim=0)) == 1797
    assert Digits("held-out", dtype=torch.float64)[0][0].dtype == torch.float64


@pytest.mark.long
def test_digits_are_those_that_scikit_learn_loads_but_do_not_import_it(monkeypatch):
    """Importing it took each rank more time than its own start."""
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sklearn.datasets", None)  # an import of it would fail
        read = Digits().fetch(range(1438))
    monkeypatch.setattr("counterpoint.data.digits.FILE", "nowhere.csv.gz")  # as if another version kept it elsewhere
    loaded = Digits().fetch(range(1438))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(read, loaded, strict=True))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(DataError, match=r"scikit-learn, which is not installed; .*pip install counterpoint\[data\]"):
        Digits()


def test_the_features_of_a_line_never_change():
    rows = hash_lines([b"import os"], line_len=16, num_features=6, num_rows=NUM_ROWS)
    assert rows.tolist() == [[892160, 830821, 476640, 638557, 223274, 921442]]


def reference_rows(line, num_rows):
    """The same features, one after the other."""

    def fnv(run, start):
        for byte in run:
            start = (start ^ byte) * 0x01000193 % 2**32
        return start % (num_rows - 1) + 1

    grams = [line[at : at + size] for size in (3, 4, 5) for at in range(len(line) - size + 1)]
    tokens = line.replace(b".", b" ").replace(b"(", b" ").replace(b")", b" ").split()
    return [fnv(token, 0x2F0B4C47) for token in tokens] + [fnv(gram, 0x811C9DC5) for gram in grams]


def test_features_are_the_words_and_then_the_runs_of_three_four_and_five_bytes():
    lines = [b"self.assert_(x1)", b"ab", b"", "größe".encode()]
    rows = hash_lines(lines, line_len=16, num_features=60, num_rows=1000)
    for line, row in zip(lines, rows, strict=True):
        expected = reference_rows(line, 1000)
        assert row.tolist() == expected + [0] * (60 - len(expected))


def test_lines_are_held_out_by_file_and_their_classes_are_in_both_parts(folder):
    train, held_out = split_lines(root=folder)
    assert train.classes == held_out.classes == ("alpha", "beta", "gamma")
    held_out_files = [source for source in read_sources(folder) if is_held_out(source.path, 5)]
    assert len(held_out) == 9 * len(held_out_files)
    assert len(train) + len(held_out) == 9 * 60
    assert train.fetch(range(len(train)))[1].unique().tolist() == [0, 1, 2]


def test_the_library_has_twenty_packages_to_tell_apart(library):
    train, held_out = split_lines(limit=3000, held_out_limit=1000)
    assert (len(train), len(held_out), len(train.classes)) == (3000, 1000, 20)
    features, labels = train.fetch(np.arange(3000))
    assert (features.shape, features.dtype, labels.dtype) == ((3000, 96), torch.int64, torch.int64)
    assert 0 <= features.min() <= features.max() < NUM_ROWS
    assert labels.unique().numel() > 15


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda s: Text(s, context=0), "context is 0 and limit is None"),
        (lambda s: Text(s[:1], context=10**6), "bytes of text are shorter than one window of 1000001"),
        (lambda s: SourceLines(s, ["delta"]), "none of the 60 files has a line of one of the 1 classes"),
        (lambda s: SourceLines(s, ["alpha"], limit=0), "limit is 0; give 1 line or more"),
        (
            lambda s: select_split(s, "test", 5),  # type: ignore[arg-type]
            "a dataset has no split 'test'; give train or held-out",
        ),
        (lambda s: select_split(s[:1], "held-out", 10**6), "none of the 1 files is in the split 'held-out':"),
        (lambda s: Digits("test"), "have no split 'test'; give train"),  # type: ignore[arg-type]
        (lambda s: Digits(dtype=torch.int64), r"dtype is torch\.int64; normalized images need a floating"),
    ],
)
def test_a_dataset_that_cannot_be_built_says_why(folder, make, text):
    with pytest.raises(DataError, match=text):
        make(read_sources(folder))


def test_an_empty_folder_is_no_standard_library(tmp_path):
    with pytest.raises(DataError, match=r"no readable .py file below"):
        read_sources(tmp_path)


def test_one_package_alone_cannot_be_classified(folder):
    sources = [source for source in read_sources(folder) if source.top_level == "alpha"]
    with pytest.raises(DataError, match="only 1 of the top-level packages have files in both splits;"):
        most_frequent_classes(sources, sources)
