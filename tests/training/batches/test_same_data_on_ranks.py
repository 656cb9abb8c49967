"""Ranks that were called with other arguments or other data are named before the first step."""

import os
import random
import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from counterpoint.data.fetch import is_same_dataset
from counterpoint.errors import DataError, PlanError
from counterpoint.fabric.local import LocalWorld
from counterpoint.runtime.sample_layout import SampleLayout
from counterpoint.training.agreement.rank_facts import CallFacts, describe_arguments, describe_values_read
from counterpoint.training.batches.batch_source import open_batches
from counterpoint.training.batches.dataset_batches import DataLoadingConfig

X = torch.arange(24.0).view(12, 2)
PAIRS = TensorDataset(X, X)
LAYOUT = SampleLayout(torch.nn.Linear(2, 1), {}, ())


def open_data(data, *, batch_size=4, seed=0):
    if callable(data):
        data = data() if isinstance(data(), DataLoader) else data
        batch_size = None
    loading = DataLoadingConfig()
    return open_batches(data, layout=LAYOUT, batch_size=batch_size, collate_fn=None, loading=loading, seed=seed)


def describe(data, *, seed=0):
    return open_data(data, seed=seed).describe()


def compare(*facts):
    """Return the error that each rank raises; each has facts of its own."""

    def work(fabric):
        try:
            facts[fabric.rank].require_same(fabric, [[["the plan", "data(3)"]]])
        except (DataError, PlanError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with LocalWorld(len(facts)) as world:
        errors = world.run(work)
    assert len(set(errors)) == 1
    return errors[0]


def loader(seed):
    return DataLoader(TensorDataset(X, X), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed))


DATA = {
    "length": (TensorDataset(X, X), TensorDataset(X[:8], X[:8]), "the dataset is 12 samples of .*TensorDataset on ranks"),
    "content": (TensorDataset(X, X), TensorDataset(X + 1, X), r"the content of samples is digest \w+ of 8 of them on ranks 0, 2, digest"),
    "order": (Subset(PAIRS, range(12)), Subset(PAIRS, [*range(5), 6, 5, *range(7, 12)]), "indices with the digest .* on ranks 0, 2, 12"),
    "shape": ([(x, 1) for x in X], [(x[:1], 1) for x in X], "the content of samples is digest "),
    "sampler": (lambda: loader(1), lambda: loader(2), r"the order of samples is \[.*\]\.\.\., digest \w+ on ranks 0, 2, .* the same seed on all"),
    "batches": (lambda: [(X, X)], lambda: [(X + 1, X)], "the first batch is 12 samples, digest .* and draw nothing that dif"),
    "kind": (TensorDataset(X, X), lambda: [(X, X)], "at index 0 ranks 0, 2 have the dataset, rank 1 has the data; "),
}  # fmt: skip


@pytest.mark.parametrize("what", DATA)
def test_other_data_on_one_rank_are_named(what):
    own, other, text = DATA[what]
    mine, theirs, same = (CallFacts((), describe(data)) for data in (own, other, own))
    assert compare(mine, same, mine) == ""
    error = compare(mine, theirs, mine)
    assert error.startswith("DataError: the ranks were given different data: ")
    assert re.search(text, error)


class Flipped(Dataset[Any]):
    """Flips a sample, or does not."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index].flip(0) if random.random() < 0.5 else X[index], index


def test_samples_that_are_drawn_are_the_same_on_all_ranks():
    """Ranks read them from generators in other states: one found a sample equal in two reads, another did not."""
    found = []
    for state in range(20):
        random.seed(state)
        found.append((describe(Flipped()), open_data(Flipped()).metadata()))
    assert all(one == found[0] for one in found)


def test_samples_that_are_drawn_are_continued_from_a_checkpoint_without_their_hash():
    saved = {"num_samples": 12, "type_name": "__main__.Flipped", "ends": "random"}
    current = open_data(Flipped()).metadata()["dataset"]
    assert current["ends"] != "random"
    assert is_same_dataset(saved, current)
    assert not is_same_dataset({**saved, "type_name": "__main__.Images"}, current)


def test_a_sample_between_the_first_and_the_last_is_compared():
    changed = X.clone()
    changed[1:-1] += 1
    assert describe(TensorDataset(X, X)) != describe(TensorDataset(changed, X))


class Broken(Dataset[Any]):
    """Has samples of different lengths, and one that cannot be read."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == 7:
            raise OSError(f"file {index} is broken")
        return torch.ones(index + 1), torch.tensor(index)


def test_samples_that_no_batch_has_are_not_read_and_others_need_not_be_stacked():
    """A sample between those of the sampler, or the shape of one, ended the run before its first step."""
    chosen = DataLoader(
        Broken(), batch_size=1, sampler=SubsetRandomSampler([index for index in range(12) if index != 7])
    )
    assert describe(lambda: chosen)[2][1].endswith("of 8 of them")
    assert describe(lambda: DataLoader(Broken(), batch_size=1))[2][1].endswith("of 8 of them")


def test_another_seed_is_another_order():
    mine, theirs = (CallFacts((), describe(TensorDataset(X, X), seed=seed)) for seed in (0, 1))
    assert "the order of samples is [" in compare(mine, theirs)


@pytest.mark.parametrize(
    ("name", "own", "other", "text"),
    [
        ("batch_size", 8, 16, "8 on ranks 0, 2, 16 on rank 1; give the same value on all of them"),
        ("max_steps", None, 3, "None on ranks 0, 2, 3 on rank 1; give"),
        ("evaluate_every", 2, 4, "2 on ranks 0, 2, 4 on rank 1; give"),
        ("metrics", lambda out, _: out, lambda out, _: -out, r".*<lambda>, code \w+ on ranks 0, 2, .*<lambda>, code"),
    ],
)
def test_another_argument_on_one_rank_is_named(name, own, other, text):
    mine, theirs = (
        CallFacts(describe_arguments({"epochs": 2, name: value}), [["the dataset", "a"]]) for value in (own, other)
    )
    error = compare(mine, theirs, mine)
    assert re.match(f"PlanError: the ranks do not make the same call: the argument {name} is {text}", error)


def test_values_that_code_reads_are_compared_unless_they_may_differ_and_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("MY_TOKEN", "abc")
    values: list[Any] = [None, 2, 0.5]
    writer, _calls, scale = values

    def loss(output, _):
        is_logged = os.environ["LOCAL_RANK"] == "0" and os.environ["MY_TOKEN"] and writer and _calls
        return output * (scale + bool(is_logged))

    facts = describe_values_read(torch.nn.Linear(1, 1), loss)
    assert [name for name, _ in facts] == [
        "the environment variable MY_TOKEN", f"the variable scale of {loss.__qualname__}"
    ]  # fmt: skip
    assert "abc" not in facts[0][1]
