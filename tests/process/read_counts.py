"""What each of several processes reads of a dataset that all of them are given."""

import torch
from torch import nn

import counterpoint as cp
from tests.training.trainers import dataset, make_trainer


class CountingDataset:
    """Notes the samples that are read, and how often."""

    def __init__(self, num_samples):
        self.samples = dataset(num_samples)
        self.read_indices: list[int] = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read_indices.append(index)
        return self.samples[index]


def build_deep_model():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)), nn.Linear(6, 3)).double()


def count_reads(strategies):
    """Return for each strategy what this rank has read: to build, in three batches, and to measure 10 samples."""
    result = []
    for text in strategies:
        data, held_out = CountingDataset(12), CountingDataset(10)
        plan = cp.Plan.parse(text).with_microbatches_for(12)
        with make_trainer(plan, build_deep_model(), progress="off") as one:
            one.ensure_ranks(one.open_eval_batches(data, 12, None))
            built, data.read_indices = data.read_indices, []
            one.fit(data, batch_size=12, epochs=3)
            one.evaluate(held_out, batch_size=12)
        result.append([sorted(set(built)), sorted(data.read_indices), sorted(held_out.read_indices)])
    return result
