"""Datasets for workers: other processes import them from here."""

import os
import random
import signal

import numpy as np
import torch


class Numbers:
    """A sample is its own index."""

    def __init__(self, num_samples=24):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


class Drawn(Numbers):
    """A sample is what three global generators draw."""

    def __getitem__(self, index):
        return torch.tensor([random.random(), float(np.random.random()), float(torch.rand(()))]), index


class DrawnTogether(Numbers):
    """Many samples are drawn at once."""

    def __getitems__(self, indices):
        return [(torch.rand(1), index) for index in indices]


class Noted(Numbers):
    """Every reading is noted in a file."""

    def __init__(self, path, num_samples=24):
        super().__init__(num_samples)
        self.path = path

    def __getitem__(self, index):
        with self.path.open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return super().__getitem__(index)


def read_by_workers(path):
    """Return what others than this process have read."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [int(index) for index, pid in lines if int(pid) != os.getpid()]


class FailsAt(Numbers):
    """One sample cannot be read, in one of several ways."""

    def __init__(self, index, how):
        super().__init__()
        self.index = index
        self.how = how

    def __getitem__(self, index):
        if index == self.index:
            getattr(self, self.how)()
        return super().__getitem__(index)

    def fail(self):
        raise ValueError("the file is cut short")

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        os._exit(3)

    def hang(self):
        signal.pause()


class Unsendable(Numbers):
    """It holds what cannot travel."""

    def __init__(self):
        super().__init__()
        self.change = lambda x: x
