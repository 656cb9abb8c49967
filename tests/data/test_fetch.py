import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from counterpoint.data.fetch import fetch, fetch_batch, fingerprint, require_fields
from counterpoint.errors import DataError


class Listed(Dataset[object]):
    """A dataset of the items of a list."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Quick(Listed):
    """A dataset whose fetch returns given samples."""

    def __init__(self, fields):
        super().__init__()
        self.fields = fields

    def fetch(self, indices):
        return self.fields


class Noisy(Listed):
    """A dataset that adds noise to its samples."""

    def __getitem__(self, index):
        x, y = self.items[index]
        return x + torch.rand(()), y


def numbers(num_samples):
    return [(torch.full((2,), float(index)), torch.tensor(index)) for index in range(num_samples)]


def test_samples_are_stacked_in_the_order_of_the_indices():
    x, y = fetch(Listed(*numbers(5)), np.array([4, 0, 4]))
    assert x.tolist() == [[4, 4], [0, 0], [4, 4]]
    assert y.tolist() == [4, 0, 4]


def test_a_sample_may_have_several_inputs_and_plain_numbers_and_arrays():
    a, b, y = fetch(Listed((np.ones(3), np.float32(2), 7)), [0])
    assert (a.dtype, b.dtype, y.dtype) == (torch.float64, torch.float32, torch.int64)
    assert (a.shape, b.shape, y.shape) == ((1, 3), (1,), (1,))


def test_all_ways_to_read_a_dataset_give_the_same_tensors():
    listed = Listed(*numbers(6))
    tensors = TensorDataset(*fetch(listed, range(6)))
    for dataset in (listed, tensors, Subset(tensors, range(6)), Subset(listed, range(6))):
        x, y = fetch(dataset, [5, 2])
        assert (x[:, 0].tolist(), y.tolist()) == ([5, 2], [5, 2])


def test_no_index_gives_empty_tensors_of_the_shape_of_a_sample():
    for dataset in (Listed(*numbers(2)), TensorDataset(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))):
        x, y = fetch(dataset, [])
        assert (x.shape, y.shape, y.dtype) == ((0, 2), (0,), torch.int64)


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (
            Listed((1, 2), torch.zeros(3)),
            "sample 1 is one tensor of shape \\(3,\\).*return the target as its last",
        ),
        (Listed((1, 2), (1,)), "sample 1 is a tuple of 1 fields"),
        (Listed((1, 2), {"x": 1}), "sample 1 is a dict; a sample is a tuple"),
        (Listed((1, 2), ("cat", 2)), "field 0 of sample 1 is a str; .*convert it in the dataset"),
        (
            Listed((torch.zeros(2), 1), (torch.zeros(3), 1)),
            r"sample 1 has fields \(3,\) float32, \(\) int64, but ",
        ),
        (
            Listed((1, 2), (1, 2.0)),
            r"sample 1 has fields .* float32, but sample 0 of the same batch has .* int64",
        ),
        (TensorDataset(torch.zeros(2, 2)), "the TensorDataset gives 1 field; .*add the target"),
        (Quick(torch.zeros(2)), r"Quick.fetch returned one tensor of shape \(2,\); it must return a tuple"),
        (
            Quick((torch.zeros(2), [1, 2])),
            "Quick.fetch returned a tuple of 2 fields; it must return a tuple of t",
        ),
        (Quick((torch.zeros(2), torch.zeros(1))), r"returned field 1 of shape \(1,\) for 2 indices"),
        (Quick((torch.zeros(2),)), "Quick.fetch gives 1 field"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named(dataset, text):
    with pytest.raises(DataError, match=text):
        fetch(dataset, [0, 1])


def test_an_error_of_the_dataset_itself_says_which_sample_was_read():
    with pytest.raises(IndexError) as caught:
        fetch(Listed((1, 2)), [0, 8])
    assert caught.value.__notes__ == ["while reading sample 8 of the Listed"]


def test_a_fingerprint_changes_with_the_length_the_class_and_either_end():
    listed = numbers(4)
    prints = [
        fingerprint(Listed(*listed)),
        fingerprint(Listed(*listed[:3])),
        fingerprint(Listed(*listed[1:], listed[0])),
        fingerprint(Listed(listed[0], *listed[2:], listed[1])),
        fingerprint(TensorDataset(*fetch(Listed(*listed), range(4)))),
    ]
    assert len(set(prints)) == 5
    assert fingerprint(Listed(*numbers(4))) == prints[0]


def test_a_fingerprint_of_samples_with_noise_is_the_same_every_time_and_costs_no_random_number():
    torch.manual_seed(1)
    first, second = fingerprint(Noisy(*numbers(3))), fingerprint(Noisy(*numbers(3)))
    assert first == second
    assert first.to_dict()["ends"] == "random"
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert drawn == torch.rand(())


def test_an_empty_dataset_has_no_fingerprint():
    with pytest.raises(DataError, match="the Listed has 0 samples"):
        fingerprint(Listed())


def test_samples_of_other_forms_are_stacked_field_by_field():
    samples = [{"x": torch.full((2,), float(index)), "more": (index, [np.float32(index)])} for index in range(3)]
    batch = fetch_batch(Listed(*samples), np.array([2, 0]))
    assert batch["x"].tolist() == [[2, 2], [0, 0]]
    assert (batch["more"][0].tolist(), batch["more"][1][0].tolist()) == ([2, 0], [2, 0])
    turned = Listed({"a": 1, "b": 2}, {"b": 4, "a": 3})
    assert {name: values.tolist() for name, values in fetch_batch(turned, np.array([0, 1])).items()} == {
        "a": [1, 3],
        "b": [2, 4],
    }


def test_where_only_tuples_are_possible_other_forms_are_refused():
    dataset = Listed({"x": 1, "labels": 2})
    with pytest.raises(DataError, match=r"^a batch of the Listed is a dict, but here a sample is a tuple"):
        require_fields(fetch_batch(dataset, np.array([0])), dataset)
    with pytest.raises(DataError, match=r"^sample 0 is a dict; a sample is a tuple"):
        fetch(dataset, [0])
