"""YAML texts of users: each mistake is an error with the file and the line, in a plan, a job, a cluster and ``--set``."""

import tracemalloc
from datetime import date
from itertools import pairwise

import pytest

from counterpoint import yaml_reader
from counterpoint.cli.config import file_layer, set_layer
from counterpoint.errors import PlanError
from counterpoint.optim.validation import shorten
from counterpoint.plan.plan import Plan
from counterpoint.world.cluster_file import parse_cluster
from counterpoint.yaml_reader import MAX_CHARACTERS, compose_yaml, construct_value

BOMB = "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"y{level}: &y{level} [{', '.join([f'*y{level - 1}'] * 10)}]\n" for level in range(1, 8)
)


def value_of(text):
    node = compose_yaml(text, "a.yaml", "the text")
    return None if node is None else construct_value(node, "a.yaml")


def refused(read, text):
    with pytest.raises(PlanError) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, two, 3.5, 1e-3, true, 2024-02-29]", {"a": [1, "two", 3.5, 1e-3, True, date(2024, 2, 29)]}),
        ("a: &a [1]\nb: *a", {"a": [1], "b": [1]}),
        ("a: 0x10\nb: -12", {"a": 16, "b": -12}),
        ("a: '2024-02-30'", {"a": "2024-02-30"}),
    ],
)
def test_a_text_is_read_as_its_values(text, value):
    assert value_of(text) == value


WRONG_NODES = [
    ("x: [", "is not YAML: while parsing a flow node"),
    ("x: \0", "is not YAML: unacceptable character #x0000"),
    ("x: *y", "is not YAML: found undefined alias"),
    ("? [y]\n: 1", "a key is a list or a mapping; give it a name"),
    ("x: &y [*y]", "a value contains itself, by its alias; write it without"),
    ("x: " + "[" * 2000, "nested more than 50 levels deep"),
    ("x: " + "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
    (f"y0: &y0 {BOMB}", "this is more than 20000 values; write less"),
]
WRONG_VALUES = [
    ("2024-02-30", "2024-02-30 is not of the type timestamp; put quotes around a text"),
    ("!!int x", "x is not of the type int; put quotes around a text"),
    ("!!bool x", "x is not of the type bool; put quotes around a text"),
    ("!!timestamp x", "x is not of the type timestamp; put quotes around a text"),
    ("!!python/object:os.system x", "could not determine a constructor for the tag"),
    ("9" * 5000, "a whole number has 5000 digits; give at most 20"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_NODES)
def test_a_text_that_cannot_be_read_is_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"# a comment\n{text}", encoding="utf-8")
    assert message in refused(file_layer, path)
    assert refused(file_layer, path).startswith(f"{path}:")
    for read in (lambda text: Plan.from_yaml(text, "a.yaml"), lambda text: parse_cluster(text, name="a.yaml")):
        assert message in refused(read, text)
        assert refused(read, text).startswith("a.yaml:")


@pytest.mark.parametrize(("text", "message"), WRONG_VALUES)
def test_a_value_that_cannot_be_read_is_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(f"training:\n  seed: {text}\n", encoding="utf-8")
    assert refused(file_layer, path).startswith(f"{path}:2: {message}")
    plan = f"plan:\n  strategy: data(2)\n  num_microbatches: {text}\n"
    assert refused(lambda text: Plan.from_yaml(text, "plan.yaml"), plan).startswith(f"plan.yaml:3: {message}")
    assert refused(Plan.from_yaml, plan).startswith(message)
    assert refused(set_layer, [f"training.seed={text}"]).startswith(
        f"--set {shorten(f'training.seed={text}')}: {message}"
    )


SMALL_BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefgh")
)
HOSTILE = {
    "aliases": SMALL_BOMB,
    "merged keys": "a: &a {k: 1}\n" + "".join(
        f"{name}: &{name}\n  <<: [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefgh")
    ),
    "values": "x: [" + "1," * 20_000 + "]",
    "keys": "".join(f"k{index}: 1\n" for index in range(20_000)),
    "lists": "[" * 20_000,
    "nested keys": "? " * 20_000,
    "items": "- " * 20_000,
    "a number": "plan: " + "1" * 20_000,
    "parts of a number": "plan: " + "1:" * 20_000 + "1",
    "a name": "x" * 20_000 + ": 1",
    "a tag": "x: !<" + "y" * 20_000 + "> 1",
    "an alias": "x: *" + "y" * 20_000,
    "a text": 'x: "' + "\\n" * 20_000,
    "a directive": "%" + "y" * 20_000,
}  # fmt: skip


@pytest.mark.long(quick=["aliases", "merged keys", "nested keys", "items"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_text_is_refused_in_little_memory_and_few_words(monkeypatch, text):
    monkeypatch.setattr(yaml_reader, "MAX_NODES", 1000)
    tracemalloc.start()
    try:
        message = refused(lambda text: Plan.from_yaml(text, "a.yaml"), text)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text) + 2 * 2**20
    finally:
        tracemalloc.stop()
    assert len(message) < 2000


def test_values_are_counted_while_a_text_is_read_and_as_often_as_aliases_repeat_them():
    assert refused(value_of, "[" + "1," * 20_001 + "]") == "a.yaml:1: the text has more than 20000 values; write less"
    assert refused(value_of, SMALL_BOMB) == "a.yaml:5: this is more than 20000 values; write less"


def test_a_wrong_value_is_shown_without_its_end():
    plan = "plan:\n  strategy: data(2)\n  num_microbatches: {}\n"
    assert len(refused(Plan.from_yaml, plan.format("x" * 100_000))) < 400
    assert len(refused(Plan.from_yaml, plan.format("2\n  passes: " + "[" + "x, " * 10_000 + "]"))) < 400
    assert len(refused(set_layer, ["x" * 100_000 + "=1"])) < 1000
    assert len(refused(parse_cluster, f"device: {'x' * 100_000}")) < 1000


def test_a_text_that_is_too_long_or_no_text_is_refused():
    long = "a" * (MAX_CHARACTERS + 1)
    assert refused(Plan.from_yaml, long) == (
        "the plan file has 1000001 characters; give a text of at most 1000000 characters"
    )
    assert refused(Plan.from_yaml, None).startswith("the plan file is of the type NoneType; give a text")


@pytest.mark.parametrize("seed", [2**63 - 1, 2**64 - 1, -(2**63)])
def test_the_largest_seeds_are_numbers(seed):
    root = compose_yaml(f"seed: {seed}", "", "the job file")
    assert root is not None
    assert construct_value(root, "") == {"seed": seed}
