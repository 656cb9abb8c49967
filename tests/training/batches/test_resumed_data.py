"""A run that continues in mid-epoch gets the batches that it would have got, or is refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import counterpoint as cp
from counterpoint.data.sampler import LengthGroupedBatchSampler
from counterpoint.errors import CheckpointError
from tests.covering import each_value_once
from tests.training.trainers import StopAt, build_seeded, equal_bits, make_generator, state_of

X = torch.randn(22, 4, generator=make_generator(), dtype=torch.float64)
PAIRS = TensorDataset(X, X.sum(1))


class Stateful(IterableDataset[object]):
    """Counts the samples that it has given, and adds noise to them."""

    def __init__(self):
        self.given, self.num_read = 0, 0

    def __iter__(self):
        while self.given < len(X):
            self.given, self.num_read = self.given + 1, self.num_read + 1
            x, y = PAIRS[self.given - 1]
            yield x + torch.randn((), dtype=torch.float64), y
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Counted(Sampler[int]):
    """Begins with another sample in every epoch, and keeps count of them."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return len(X)

    def __iter__(self):
        self.epoch += 1
        return iter(torch.arange(len(X)).roll(self.epoch).tolist())


class CountedState(Counted):
    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


def noisy_batches():
    for start in range(0, len(X), 4):
        x, y = PAIRS[start : start + 4]
        yield x + torch.randn((), dtype=torch.float64), y


def noisy_collate(pairs):
    x, y = (torch.stack(part) for part in zip(*pairs, strict=True))
    return x + torch.randn((), dtype=torch.float64), y


SOURCES = {
    "a loader that shuffles": lambda: DataLoader(PAIRS, batch_size=4, shuffle=True),
    "a loader with a generator": lambda: DataLoader(PAIRS, batch_size=4, shuffle=True, generator=make_generator(4)),
    "a sampler with a generator": lambda: DataLoader(
        PAIRS, batch_sampler=BatchSampler(RandomSampler(PAIRS, generator=make_generator(4)), 4, drop_last=False)
    ),
    "a sampler with a state": lambda: DataLoader(PAIRS, batch_size=4, sampler=CountedState()),
    "batches of similar length": lambda: DataLoader(
        PAIRS, batch_sampler=LengthGroupedBatchSampler([*range(1, 23)], tokens_per_batch=40)
    ),
    "a collate function that draws": lambda: DataLoader(PAIRS, batch_size=4, shuffle=True, collate_fn=noisy_collate),
    "a stream with a state": Stateful,
    "a loader of a stream with a state": lambda: DataLoader(Stateful(), batch_size=4),
    "a list of batches": lambda: [(x, y) for x, y in zip(X.split(4), PAIRS.tensors[1].split(4), strict=True)],
    "a function that returns a generator": lambda: noisy_batches,
}


def fit(data, strategy="data(2)", **options):
    """Return the losses and the state of a model, with a batch size where data need one."""
    size = 4 if isinstance(data, Stateful) else None
    model = build_seeded(lambda: nn.Linear(4, 1))
    callbacks = options.pop("callbacks", ())
    with cp.Trainer(
        model,
        loss=lambda output, targets: (output.squeeze(1) - targets).square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        strategy=strategy,
        callbacks=callbacks,
        progress="off",
    ) as trainer:
        return trainer.fit(data, batch_size=size, epochs=3, **options).losses, state_of(model)


def interrupt(data, folder, step):
    """Save after each step, and stop after one."""
    with pytest.raises(KeyboardInterrupt):
        fit(data, checkpoint_dir=folder, save_every=1, callbacks=[StopAt(step)])


@pytest.mark.long(quick=["a collate function that draws-7"])
@pytest.mark.parametrize(("source", "step"), each_value_once([*SOURCES], [1, 7]))
def test_a_run_continues_in_mid_epoch_as_if_it_had_not_stopped(source, step, tmp_path):
    losses, params = fit(SOURCES[source]())
    interrupt(SOURCES[source](), tmp_path, step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a function has no position")
        rest, resumed = fit(
            SOURCES[source](), "data(1)" if source == "a loader that shuffles" else "data(2)", resume=tmp_path
        )
    assert rest == pytest.approx(losses[step:], rel=1e-12)
    assert equal_bits(resumed, params) or source == "a loader that shuffles"


def test_a_stream_with_a_state_is_not_read_again(tmp_path):
    interrupt(Stateful(), tmp_path, 3)
    stream = Stateful()
    fit(stream, resume=tmp_path)
    assert stream.num_read == 3 * len(X) - 3 * 4 + 4  # and a batch of the first epoch, by which the ranks are built


def test_a_stream_without_a_state_is_read_again_and_that_is_said_once(tmp_path):
    interrupt(noisy_batches, tmp_path, 3)
    with pytest.warns(
        RuntimeWarning, match=r"^a function has no position to continue from, so the run reads 3 batches of"
    ):
        fit(noisy_batches, resume=tmp_path)


def test_another_order_than_that_of_the_checkpoint_is_refused(tmp_path):
    interrupt(DataLoader(PAIRS, batch_size=4, sampler=Counted()), tmp_path, 13)
    with pytest.raises(
        CheckpointError, match=r"^the order of samples that BatchSampler draws for epoch 2 is another one"
    ):
        fit(DataLoader(PAIRS, batch_size=4, sampler=Counted()), resume=tmp_path)


def test_a_loader_continues_with_another_batch_size_if_its_order_is_the_same(tmp_path):
    def loader(batch_size):
        return DataLoader(PAIRS, batch_size=batch_size, shuffle=True, generator=make_generator(4))

    interrupt(loader(4), tmp_path, 8)  # 8 samples of the second epoch are done
    with pytest.warns(UserWarning, match=r"continues at batch 1 of epoch 1, and reads 3 samples of that epoch again; "):
        losses, _ = fit(loader(5), "solo", resume=tmp_path, resume_batch_size="new")
    assert len(losses) == 4 + 5
    with pytest.raises(CheckpointError, match=r"^the order of samples that BatchSampler draws for epoch 1 is another"):
        fit(DataLoader(PAIRS, batch_size=5), "solo", resume=tmp_path, resume_batch_size="new")


def test_a_stream_continues_with_another_batch_size_between_two_epochs_only(tmp_path):
    def fit_stream(batch_size, **options):
        with cp.Trainer(nn.Linear(4, 1).double(), loss=nn.functional.mse_loss, optimizer=torch.optim.SGD,
                        strategy="solo", progress="off") as trainer:  # fmt: skip
            samples = [(x, x[:1]) for x in X]
            return trainer.fit(lambda: iter(samples), batch_size=batch_size, epochs=3, **options).losses

    fit_stream(11, checkpoint_dir=tmp_path, save_every=1, max_steps=3, keep_last=None)
    with pytest.raises(CheckpointError, match=r"^.*step-00000003 was saved with batch size 11, this run has 8"):
        fit_stream(8, resume=tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=r"is at batch 1 of epoch 1, of 11 samples each.*resume with batch_size="):
        fit_stream(8, resume=tmp_path / "step-00000003", resume_batch_size="new")
    with pytest.warns(UserWarning, match="continues at batch 0 of epoch 1"):
        assert len(fit_stream(8, resume=tmp_path / "step-00000002", resume_batch_size="new")) == 6


def test_another_stream_than_that_of_the_checkpoint_is_refused(tmp_path):
    interrupt([(X[:4], X[:4, 0])] * 4, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"^batch 2 of epoch 0 is another one than when the checkpoint was saved"):
        fit([(X[:4], X[:4, 1])] * 4, resume=tmp_path)
    with pytest.raises(cp.DataError, match=r"^a list gave 1 batches in epoch 0, but the run continues at batch 2; "):
        fit([(X[:4], X[:4, 0])], resume=tmp_path)


def test_random_numbers_of_data_do_not_disturb_others_and_depend_on_the_seed_only():
    torch.manual_seed(1)
    losses = fit(noisy_batches)[0]
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert drawn == torch.rand(())
    torch.manual_seed(2)
    assert fit(noisy_batches)[0] == losses
    assert fit(noisy_batches, "data(4)")[0] == pytest.approx(losses, rel=1e-12)
