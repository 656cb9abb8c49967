"""What each of several processes reads of a dataset that all of them are given."""

import torch
from torch import nn

import counterpoint as cp
from tests.training.fits import dataset, trainer


class Counted:
    """Notes the samples that are read, and how often."""

    def __init__(self, num_samples):
        self.samples = dataset(num_samples)
        self.read: list[int] = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read.append(index)
        return self.samples[index]


def deep():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)), nn.Linear(6, 3)).double()


def count(strategies):
    """Return for each strategy what this rank has read: to build, in three batches, and to measure 10 samples."""
    found = []
    for text in strategies:
        data, held_out = Counted(12), Counted(10)
        plan = cp.Plan.parse(text).with_microbatches_for(12)
        with trainer(plan, deep(), progress="off") as one:
            one.ready_team(data, 12)
            built, data.read = data.read, []
            one.fit(data, batch_size=12, epochs=3)
            one.evaluate(held_out, batch_size=12)
        found.append([sorted(set(built)), sorted(data.read), sorted(held_out.read)])
    return found
