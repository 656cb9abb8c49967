"""Whatever a fit accepts as data trains as a plain loop over the same batches does, under every plan."""

import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import counterpoint as cp
from counterpoint.data.batch_form import ForwardArguments, split_targets
from counterpoint.errors import DataError, PlanError
from tests.training.trainers import build_seeded, make_generator, max_difference, params_of

NUM_SAMPLES, WIDTH = 22, 4
X = torch.randn(NUM_SAMPLES, WIDTH, generator=make_generator(), dtype=torch.float64)
Y = torch.randint(3, (NUM_SAMPLES,), generator=make_generator())
PLANS = [("solo", 4), ("data(2)", None), ("zero3(2)", None), ("pipeline(2)", 2), ("data(4)", None)]


@dataclass
class Sample:
    x: torch.Tensor
    labels: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Net(nn.Module):
    """Takes what it computes with by any name, or a sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x, scale=None):
        x = x.x if isinstance(x, Sample) else x
        hidden = torch.tanh(self.first(x))
        return self.second(hidden if scale is None else hidden * scale)


class Samples(Dataset[object]):
    """Samples of any form, made of an input and a target."""

    def __init__(self, form):
        self.form = form

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.form(X[index], Y[index])


class Listed(Dataset[object]):
    """A dataset of batches."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Streamed(IterableDataset[object]):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def classify(output, targets):
    labels = targets.labels if isinstance(targets, Sample) else targets["y"] if isinstance(targets, dict) else targets
    return F.cross_entropy(output, labels)


def train_plain(batches, epochs=1):
    """Return parameters and losses of a plain loop over indices of samples, or over pairs."""
    model = build_seeded(Net)
    optimizer, losses = sgd(model.parameters()), []
    for batch in [*batches] * epochs:
        x, y = batch if isinstance(batch, tuple | list) and isinstance(batch[0], torch.Tensor) else (X[batch], Y[batch])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return params_of(model), losses


def fit(data, strategy="data(2)", num_microbatches=None, **options):
    model = build_seeded(Net)
    with cp.Trainer(
        model, loss=classify, optimizer=sgd, strategy=strategy, num_microbatches=num_microbatches, progress="off"
    ) as trainer:
        return trainer.fit(data, **options).losses, params_of(model)


def require_equal(result, expected):
    losses, params = result
    assert losses == pytest.approx(expected[1], rel=1e-12)
    assert max_difference(params, expected[0]) < 1e-12


def in_order(batch_size=8, stop=NUM_SAMPLES):
    return [list(range(start, min(start + batch_size, stop))) for start in range(0, stop, batch_size)]


FORMS = {
    "a tuple": lambda x, y: (x, y),
    "a named tuple": Pair,
    "a dict with labels": lambda x, y: {"x": x, "labels": y},
    "a dict of other keys": lambda x, y: {"x": x, "y": y},
    "a dict and a target": lambda x, y: ({"x": x, "scale": torch.ones(8, dtype=torch.float64)}, y),
    "two inputs and a target": lambda x, y: (x, torch.ones(8, dtype=torch.float64), y),
    "a dataclass": Sample,
}


@pytest.mark.long(quick=["data(2)-two inputs and a target", "data(2)-a dataclass"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2)"])
def test_samples_of_any_form_train_as_pairs_do(form, strategy):
    require_equal(
        fit(Samples(FORMS[form]), strategy, batch_size=8), fit(TensorDataset(X, Y), "solo", batch_size=8)[::-1]
    )


class Ordered(Net):
    """Uses what only an OrderedDict can."""

    def forward(self, x, scale=None):
        assert scale is not None
        scale.move_to_end("first")
        return super().forward(x, scale.popitem()[1])


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)"])
def test_an_ordered_dict_of_inputs_stays_one_in_every_microbatch(strategy):
    def inputs():
        return {"x": X, "scale": OrderedDict(first=torch.full((NUM_SAMPLES, 8), 2.0, dtype=X.dtype), other=X)}

    def train(strategy):
        model = build_seeded(Ordered)
        with cp.parallelize(model, sgd, F.cross_entropy, strategy=strategy) as step:
            losses = [float(step(inputs(), Y)) for _ in range(2)]
        return losses, params_of(model)

    plain, losses = build_seeded(Ordered), []
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(F.cross_entropy(plain(**inputs()), Y))
        losses[-1].backward()
        optimizer.step()
    require_equal(train(strategy), (params_of(plain), [loss.item() for loss in losses]))


def test_a_key_that_nothing_uses_is_named():
    batch = {"x": X, "y_true": Y, "labels": Y}
    with pytest.warns(
        UserWarning, match=r"^forward of Net takes no y_true, so the batch's values of that name are used"
    ):
        inputs, targets = split_targets(batch, ForwardArguments.of(Net()))
    assert (list(inputs), targets is Y) == (["x"], True)


@pytest.mark.long(quick=["pipeline(2)-2", "zero3(2)-None", "data(2)-None"])
@pytest.mark.parametrize(("strategy", "num_microbatches"), PLANS, ids=str)
def test_a_loader_trains_as_a_plain_loop_over_it(strategy, num_microbatches):
    def loader():
        return DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=make_generator(5))

    plain = loader()
    require_equal(
        fit(loader(), strategy, num_microbatches, epochs=2), train_plain([*map(tuple, plain), *map(tuple, plain)])
    )


@pytest.mark.long(quick=["data(2)-options1-batches1", "data(2)-options3-batches3", "data(2)-options4-batches4"])
@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"batch_size": 8}, in_order()),
        ({"batch_size": 8, "drop_last": True}, in_order(stop=16)),
        ({"batch_size": 6, "sampler": range(3, 20)}, [[*range(3, 9)], [*range(9, 15)], [*range(15, 20)]]),
        ({"batch_sampler": [[1, 2, 3], [5, 4], [21, 0, 7, 9, 8]]}, [[1, 2, 3], [5, 4], [21, 0, 7, 9, 8]]),
        ({"batch_size": 8, "collate_fn": lambda pairs: tuple(map(torch.stack, zip(*pairs, strict=True)))}, in_order()),
    ],
)
@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2)"])
def test_what_a_loader_was_made_with_is_respected(options, batches, strategy):
    require_equal(fit(DataLoader(TensorDataset(X, Y), **options), strategy), train_plain(batches))


def generate():
    yield from ((X[batch], Y[batch]) for batch in in_order())


STREAMS = {
    "an iterable dataset and a batch size": (Streamed, {"batch_size": 8}),
    "a loader of an iterable dataset": (lambda: DataLoader(Streamed(), batch_size=8), {}),
    "a list of batches": (lambda: list(generate()), {}),
    "a function that returns a generator": (lambda: generate, {}),
    "a function that returns a loader": (lambda: lambda: DataLoader(TensorDataset(X, Y), batch_size=8), {}),
    "a loader without batches": (lambda: DataLoader(Listed([*generate()]), batch_size=None), {}),
}  # fmt: skip


@pytest.mark.long(
    quick=[
        "data(2)-a function that returns a loader",
        "data(2)-an iterable dataset and a batch size",
        "data(2)-a list of batches",
        "data(2)-a function that returns a generator",
        "data(2)-a loader of an iterable dataset",
    ]
)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("strategy", ["data(2)", "pipeline(2)"])
def test_a_stream_of_batches_trains_as_a_plain_loop_over_it(stream, strategy):
    build, options = STREAMS[stream]
    require_equal(fit(build(), strategy, epochs=2, **options), train_plain(in_order(), epochs=2))


@pytest.mark.long(quick=["pipeline(2)-2", "solo-4"])
@pytest.mark.parametrize(("strategy", "num_microbatches"), PLANS, ids=str)
def test_batches_of_other_sizes_are_divided_exactly(strategy, num_microbatches):
    batches = [[*range(8)], [8, 9, 10], [11], [12, 13], [*range(14, 22)]]
    require_equal(
        fit(DataLoader(TensorDataset(X, Y), batch_sampler=batches), strategy, num_microbatches), train_plain(batches)
    )


def test_an_asynchronous_pipeline_reads_a_stream_as_a_list():
    plan = "pipeline(2, schedule=pipedream_2bw)"
    assert fit(generate, plan, 2, epochs=2)[0] == fit(list(generate()), plan, 2, epochs=2)[0]


def test_a_generator_is_read_once():
    assert len(fit(generate(), epochs=1)[0]) == 3
    with pytest.raises(
        DataError, match=r"^a generator gives its batches once, but epoch 1 reads them again; pass a func"
    ):
        fit(generate(), epochs=2)
    empty: Iterator[object] = iter([])
    with pytest.raises(DataError, match=r"^a list_iterator gave no batch in epoch 0; "):
        fit(empty)


def test_a_collate_function_gets_the_samples_of_the_global_batch():
    """It may pad to the longest sample, or mix samples."""
    seen = []

    def collate(samples):
        seen.append(len(samples))
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return x - x.mean(0), y

    expected = fit(TensorDataset(X, Y), "solo", batch_size=8, collate_fn=collate)
    require_equal(fit(TensorDataset(X, Y), "data(4)", batch_size=8, collate_fn=collate), expected[::-1])
    assert set(seen) == {8, 6}


def test_held_out_data_may_be_a_loader_or_a_stream_too():
    model = build_seeded(Net)
    with cp.Trainer(model, loss=classify, optimizer=sgd, strategy="data(2)", progress="off") as trainer:
        history = trainer.fit(
            TensorDataset(X, Y), batch_size=8, eval_dataset=DataLoader(TensorDataset(X, Y), batch_size=5)
        )
        means = [
            trainer.evaluate(data)["loss"]
            for data in (TensorDataset(X, Y), generate, [*generate()], DataLoader(Streamed(), batch_size=7))
        ]
    assert means == pytest.approx([F.cross_entropy(model(X), Y).item()] * 4, rel=1e-12)
    assert history.evaluations[-1].metrics["loss"] == pytest.approx(means[0], rel=1e-12)


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        (Samples(lambda x, y: {"pixels": x, "labels": y}), {"batch_size": 8}, DataError,
         "a batch has the keys pixels, labels, but forward of Net needs x; a dict is passed as keyword arguments"),
        (TensorDataset(X, Y), {}, PlanError, "a TensorDataset has samples, so fit needs batch_size, "),
        (3, {}, DataError, "a int is not a map-style dataset: .* nor can it be iterated; pass a dataset of samples"),
        ([X, X], {}, DataError, r"a batch is one tensor of shape \(22, 4\), which has no target; a batch is a tuple"),
        (generate, {"collate_fn": list}, PlanError, "collate_fn makes batches of samples, so it needs batch_size"),
        (DataLoader(TensorDataset(X, Y)), {"num_workers": 2}, PlanError, "num_workers=2 and a DataLoader with num_workers=0"),
        (DataLoader(TensorDataset(X, Y), batch_sampler=[["a"]]), {}, DataError, r"a batch sampler gave \['a'\]; "),
        (TensorDataset(X, Y), {"batch_size": 8, "collate_fn": lambda pairs: pairs[0]}, DataError,
         "a tensor of the batch has no dims"),
        (TensorDataset(X, Y), {"batch_size": 8, "collate_fn": lambda _: (X[:3], Y[:3])}, DataError,
         "collate_fn made a batch of 3 samples from 8; "),
        (Samples(lambda x, y: (x, "name", y)), {"batch_size": 8}, DataError, "field 1 of sample 0 is a str; .* or pass a colla"),
        (Samples(lambda x, y: {"x": x} if y else {"x": x, "y": y}), {"batch_size": 8}, DataError,
         r"sample \d+ is a dict and has other fields than sample 0 of the same batch, a dict; "),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_are_refused(data, options, error, text):
    with pytest.raises(error, match=f"^{text}"):
        fit(data, **options)


def test_a_sampler_that_gives_another_number_of_batches_than_its_length_is_refused():
    class Longer(BatchSampler):
        def __len__(self):
            return 7

    loader = DataLoader(TensorDataset(X, Y), batch_sampler=Longer(RandomSampler(X), 8, drop_last=False))
    with pytest.raises(DataError, match=r"^Longer has length 7, but gave 3 batches in epoch 0; let __len__ return"):
        fit(loader)


@pytest.mark.parametrize("form", ["a tuple", "a dict with labels", "a dict and a target", "a dataclass"])
@pytest.mark.parametrize(("strategy", "num_microbatches"), [("solo", 4), ("data(2)", None)])
def test_a_step_takes_a_batch_of_any_form(form, strategy, num_microbatches):
    model = build_seeded(Net)
    with cp.parallelize(model, sgd, classify, strategy=strategy, num_microbatches=num_microbatches) as step:
        losses = []
        for batch in in_order(stop=16):
            x, y = X[batch], Y[batch]
            if form == "a dict and a target":
                losses.append(step(({"x": x}, y)))
            else:
                losses.append(step(FORMS[form](x, y)))
    require_equal((losses, params_of(model)), train_plain(in_order(stop=16)))


def test_a_step_without_targets_refuses_a_single_tensor():
    with cp.parallelize(build_seeded(Net), sgd, classify, strategy="solo") as step:
        with pytest.raises(DataError, match=r"^a batch is one tensor of shape \(22, 4\), which has no target; "):
            step(X)
        step(X, Y)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            [X],
            "the forward of Net failed: .*; its inputs are a list of 1 values, which is one argument: give a tuple for",
        ),
        (
            X.to("meta"),
            r"a tensor of the batch, of shape \(22, 4\), is on the meta device, which has no values; give it on the",
        ),
        (
            X.float(),
            "the forward of Net failed: .*; its inputs are torch.float32, its parameters torch.float64: convert the",
        ),
        (
            X.to(torch.complex64),
            "the forward of Net failed: .*; its inputs are torch.complex64, its parameters torch.float64: convert the",
        ),
        (
            X.long(),
            "the forward of Net failed: .*; its inputs are torch.int64, its parameters torch.float64: convert the",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"])
def test_inputs_with_which_the_model_fails_are_described(inputs, text, strategy):
    step = cp.parallelize(build_seeded(Net), sgd, classify, strategy=strategy)
    with step, pytest.raises(DataError, match=f"^{text}"):
        step(inputs, Y)


@pytest.mark.parametrize("num_first", [0, 1])
@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"])
def test_inputs_of_another_width_name_the_module_that_fails(num_first, strategy):
    with cp.parallelize(build_seeded(Net), sgd, classify, strategy=strategy) as step:
        for _ in range(num_first):
            step(X, Y)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            step(X.repeat(1, 2), Y)
    note = caught.value.__notes__[0]
    assert re.search(r"with inputs of the shapes \(\d+, 8\).* in Linear\(in_features=4, out_features=8,", note)


@pytest.mark.parametrize("strategy", ["solo", "data(2)", "zero3(2)", "pipeline(2)", "tensor(2)"])
def test_a_later_batch_of_another_dtype_is_described(strategy):
    with cp.parallelize(build_seeded(Net), sgd, classify, strategy=strategy) as step:
        step(X, Y)
        with pytest.raises(DataError, match=r"(its inputs are|of the model is) torch.float32,.* torch.float64.*\.to\("):
            step(X.float(), Y)


@pytest.mark.parametrize("strategy", ["zero3(2)", "pipeline(2)"])
def test_a_batch_with_another_number_of_inputs_says_how_many(strategy):
    with cp.parallelize(build_seeded(Net), sgd, classify, strategy=strategy) as step:
        step(X, Y)
        with pytest.raises(
            DataError, match=r"the model had 1 values when it was split .*, and have 2 now; give as many"
        ):
            step((X, X[:, :1]), Y)


class DropoutNet(Net):
    """Draws random numbers."""

    def forward(self, x, scale=None):
        return super().forward(F.dropout(x, 0.1), scale)


@pytest.mark.parametrize("strategy", ["solo", "zero3(2)"])
def test_inputs_with_which_a_compiled_model_with_dropout_fails_are_described(strategy):
    step = cp.parallelize(
        build_seeded(DropoutNet), sgd, classify, strategy=strategy, compile="segments(backend=aot_eager)"
    )
    with step, pytest.raises(DataError, match=r"^the forward of DropoutNet failed: .*; its inputs are torch.float32"):
        step(X.float(), Y)


class Lookup(nn.Module):
    """Draws random numbers, and fails with indices that a trace does not see."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 6, dtype=torch.float64), nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        return self.head(F.dropout(self.table(x), 0.1))


@pytest.mark.parametrize("strategy", ["solo", "zero3(2)"])
def test_indices_out_of_range_are_not_taken_for_random_numbers_in_graphs(strategy):
    step = cp.parallelize(build_seeded(Lookup), sgd, classify, strategy=strategy, compile="segments(backend=aot_eager)")
    with step, pytest.raises(IndexError, match="index out of range"):
        step(torch.full((4,), 4), torch.zeros(4, dtype=torch.long))


def test_inputs_of_another_width_are_not_taken_for_a_line_that_cannot_be_traced():
    with cp.parallelize(
        build_seeded(Net), sgd, classify, strategy="data(2)", compile="segments(backend=eager)"
    ) as step:
        step(X, Y)
        with pytest.raises(PlanError, match=r"an operation fails, at .*Error\(.*\[11, 8\].*; give inputs of shapes"):
            step(X.repeat(1, 2), Y)
