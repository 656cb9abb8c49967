"""Batches whose samples do not all lie along dim 0: sequence-first inputs, shared inputs, lists of samples."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import counterpoint as cp
from counterpoint.errors import DataError, PlanError
from counterpoint.testing.parity import relative_difference
from counterpoint.training.trainer import Trainer
from counterpoint.world.cluster import Cluster

DOUBLE = torch.float64


class SequenceFirst(nn.Module):
    """Takes ``(time, batch, 3)`` and a state ``(1, batch, 4)``."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, dtype=DOUBLE), nn.Linear(4, 2, dtype=DOUBLE)

    def forward(self, x, state):
        return self.head(self.lstm(x, (state["hidden"], state["cell"]))[0])


class Graph(nn.Module):
    """Features ``(batch, nodes, 3)``, and one adjacency matrix for all samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, dtype=DOUBLE), nn.Linear(4, 2, dtype=DOUBLE)

    def forward(self, x, adjacency, scale=None):
        x = torch.tanh(adjacency @ self.first(x))
        return self.second(x if scale is None else x * scale)


class Images(nn.Module):
    """Takes a list of images of any sizes, and returns a list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1, dtype=DOUBLE), nn.Linear(4, 2, dtype=DOUBLE)

    def forward(self, images):
        return [self.second(torch.tanh(self.first(image)).mean((1, 2))) for image in images]


def squared_error(output, targets):
    return F.mse_loss(output, targets)


def boxes_loss(output, targets):
    return torch.stack(
        [F.mse_loss(value, entry["boxes"].mean(0)) for value, entry in zip(output, targets, strict=True)]
    ).mean()


def sequence_batches():
    for time, batch in [(5, 4), (3, 6), (4, 4)]:
        state = {name: torch.randn(1, batch, 4, dtype=DOUBLE) for name in ("hidden", "cell")}
        yield (torch.randn(time, batch, 3, dtype=DOUBLE), state), torch.randn(time, batch, 2, dtype=DOUBLE)


def graph_batches():
    for batch in (4, 6, 5):
        inputs = {"x": torch.randn(batch, 4, 3, dtype=DOUBLE), "adjacency": torch.randn(4, 4, dtype=DOUBLE)}
        yield {**inputs, "scale": torch.tensor(0.5, dtype=DOUBLE)}, torch.randn(batch, 4, 2, dtype=DOUBLE)


def image_batches():
    for batch in (4, 6):
        images = [torch.randn(3, 2 + index, 3, dtype=DOUBLE) for index in range(batch)]
        yield images, [{"boxes": torch.randn(1 + index % 3, 2, dtype=DOUBLE)} for index in range(batch)]


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "sequence": (SequenceFirst, squared_error, sequence_batches, {"batch_dims": {"x": 1, "state": 1, "targets": 1}}),
    "graph": (Graph, squared_error, graph_batches, {"shared": ("adjacency", "scale")}),
    "images": (Images, boxes_loss, image_batches, {}),
}  # fmt: skip


def sgd(params):
    return optim.SGD(params, lr=0.1)


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def train_plainly(model, loss, batches):
    """Train in a plain loop; return the losses."""
    optimizer, losses = sgd(model.parameters()), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        value = loss(call(model, inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@pytest.mark.long(quick=["images-data(2)"])
@pytest.mark.parametrize(
    ("case", "plan"),
    [(case, plan) for case in CASES for plan in ("solo", "data(2)", "zero3(2)", "pipeline(2)")
     if (case, plan) not in {("images", "zero3(2)"), ("images", "pipeline(2)")}],
)  # fmt: skip
def test_every_plan_trains_as_a_plain_loop(case, plan):
    kind, loss, batches, options = CASES[case]
    torch.manual_seed(0)
    model, data = kind(), list(batches())
    plain = copy.deepcopy(model)
    expected = train_plainly(plain, loss, data)
    num_microbatches = 1 if plan in {"data(2)", "zero3(2)"} else 2
    with cp.parallelize(model, sgd, loss, strategy=plan, num_microbatches=num_microbatches, **options) as step:
        losses = [step(inputs, targets) for inputs, targets in data]
    assert losses == pytest.approx(expected, rel=1e-12)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(relative_difference(param.detach(), other.detach()) for param, other in pairs) < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_parity_cuts_batches_as_training_does(case):
    kind, loss, batches, options = CASES[case]
    torch.manual_seed(0)
    assert cp.parity(kind(), sgd, loss, list(batches()), strategies=["data(2)"], **options).all_equal


@pytest.mark.long(quick=["graph"])
@pytest.mark.parametrize("case", ["sequence", "graph"])
def test_profiles_cut_batches_as_training_does(case):
    kind, loss, batches, options = CASES[case]
    settings: dict[str, Any] = {
        "loss": loss,
        "optimizer": sgd,
        "microbatch_sizes": [2, 5],
        "roofline_device": Cluster().device,
    }
    inputs, targets = next(batches())
    profile = cp.profile(kind(), inputs, targets, **settings, **options)
    small, large = (size.unpartitioned.forward_s for size in profile.batch_sizes)
    assert 0 < small < large


def step_of(model, **options):
    return cp.parallelize(model, sgd, squared_error, strategy="data(2)", **options)


def test_an_input_of_another_length_is_refused_with_the_options_named():
    inputs, targets = next(graph_batches())
    del inputs["scale"]
    inputs["x"] = inputs["x"][:3]
    with step_of(Graph()) as step, pytest.raises(DataError, match=r"3 and 4 samples.*batch_dims=.*shared=\(NAME,\)"):
        step(inputs, targets[:3])
    with cp.parallelize(Graph(), sgd, squared_error, strategy="solo", shared=["adjacency"]) as step:
        assert step(inputs, targets[:3]) > 0


def test_a_number_for_all_samples_is_refused_with_the_option_named():
    inputs, targets = next(graph_batches())
    with step_of(Graph()) as step, pytest.raises(DataError, match=r"no dims.*shared=\(NAME,\)"):
        step(inputs, targets)


def test_names_that_the_batch_does_not_have_are_refused():
    inputs, targets = next(graph_batches())
    with (
        step_of(Graph(), shared=["edges"]) as step,
        pytest.raises(PlanError, match=r"edges.*x, adjacency, scale, targets"),
    ):
        step(inputs, targets)


def test_a_dim_that_an_input_does_not_have_is_refused():
    inputs, targets = next(graph_batches())
    with (
        step_of(Graph(), batch_dims={"x": 3}) as step,
        pytest.raises(DataError, match=r"of x lie along dim 3, .*\(4, 4, 3\)"),
    ):
        step(inputs, targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_dims": 1}, "batch_dims=1 is not a dict"),
        ({"batch_dims": {"x": -1}}, "is not a dict from names to dims"),
        ({"shared": "adjacency"}, "is not a sequence of names"),
        ({"shared": ["x"], "batch_dims": {"x": 1}}, "x is in batch_dims and in shared"),
    ],
)
def test_options_of_another_form_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        step_of(Graph(), **options)


def test_a_list_that_can_be_read_in_two_ways_is_refused():
    tensors = [torch.randn(2, 3, dtype=DOUBLE), torch.randn(2, 3, dtype=DOUBLE)]
    with (
        step_of(Images()) as step,
        pytest.raises(DataError, match=r"list of 2 entries .* 2 entries along dim 0.*a tuple"),
    ):
        step(tensors, torch.randn(2, 2, dtype=DOUBLE))


def test_lists_of_samples_are_refused_where_a_model_is_split_along_its_operations():
    images, targets = next(image_batches())
    with cp.parallelize(Images(), sgd, boxes_loss, strategy="zero3(2)") as step:
        step(images, targets)
        with pytest.raises(DataError, match=r"2 values.* when it was split.*keeps the model whole"):
            step(images[:3], targets[:3])


def fit_sequences(samples):
    """Collate to ``(time, batch, ...)``."""
    x, hidden, targets = (torch.stack(fields, 1) for fields in zip(*samples, strict=True))
    return (x, {"hidden": hidden, "cell": torch.zeros_like(hidden)}), targets


def fit_graphs(samples):
    x, targets = map(torch.stack, zip(*samples, strict=True))
    return {"x": x, "adjacency": torch.eye(4, dtype=DOUBLE) + 0.1}, targets


def fit_images(samples):
    images, boxes = zip(*samples, strict=True)
    return list(images), [{"boxes": each} for each in boxes]


FITS: dict[str, tuple[Any, Any]] = {
    "sequence": (fit_sequences, lambda index: (torch.randn(5, 3), torch.randn(1, 4), torch.randn(5, 2))),
    "graph": (fit_graphs, lambda index: (torch.randn(4, 3), torch.randn(4, 2))),
    "images": (fit_images, lambda index: (torch.randn(3, 2 + index % 3, 3), torch.randn(1 + index % 2, 2))),
}


def fit_options(case):
    options = dict(CASES[case][3])
    return {**options, "shared": ["adjacency"]} if "shared" in options else options


def make_samples(case):
    torch.manual_seed(0)
    samples: Any = [tuple(field.double() for field in FITS[case][1](index)) for index in range(10)]
    return samples


@pytest.mark.long(quick=["graph-batches", "images-loader"])
@pytest.mark.parametrize("data", ["loader", "stream", "batches"])
@pytest.mark.parametrize("case", CASES)
def test_fit_takes_batches_of_every_form_and_evaluates_them(case, data):
    (kind, loss, _, _), collate, samples = CASES[case], FITS[case][0], make_samples(case)
    batches = [collate(samples[:6]), collate(samples[6:])]
    sources: dict[str, tuple[Any, dict[str, Any]]] = {
        "loader": (torch.utils.data.DataLoader(samples, 6, collate_fn=collate), {}),
        "stream": (lambda: iter(samples), {"batch_size": 6, "collate_fn": collate}),
        "batches": (batches, {}),
    }
    source, arguments = sources[data]
    model = kind()
    plain = copy.deepcopy(model)
    with Trainer(model, loss=loss, optimizer=sgd, strategy="data(2)", progress="off", **fit_options(case)) as trainer:
        evaluated = trainer.evaluate(source, **arguments)["loss"]
        losses = trainer.fit(source, **arguments).losses
    with torch.no_grad():
        means = [float(loss(call(plain, inputs), targets)) for inputs, targets in batches]
    assert evaluated == pytest.approx((6 * means[0] + 4 * means[1]) / 10, rel=1e-12)
    assert losses == pytest.approx(train_plainly(plain, loss, batches), rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_fit_collates_the_samples_of_a_dataset(case):
    kind, loss, _, _ = CASES[case]
    with Trainer(kind(), loss=loss, optimizer=sgd, strategy="data(2)", progress="off", **fit_options(case)) as trainer:
        history = trainer.fit(make_samples(case), batch_size=6, collate_fn=FITS[case][0])
    assert [event.num_samples for event in history.steps] == [6, 4]


@pytest.mark.parametrize("data", ["dataset", "loader", "stream"])
def test_fit_refuses_options_about_batches_that_it_stacks_itself(data):
    dataset = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.randn(4, 2))
    trainer = Trainer(nn.Linear(3, 2), loss=squared_error, optimizer=sgd, shared=["x"])
    given: dict[str, Any] = {
        "dataset": (dataset, {"batch_size": 2}),
        "loader": (torch.utils.data.DataLoader(dataset, 2), {}),
        "stream": (lambda: iter(dataset), {"batch_size": 2}),
    }
    with pytest.raises(PlanError, match=r"name x, but samples are stacked along dim 0 .* give a collate_fn"):
        trainer.fit(given[data][0], **given[data][1])


def test_a_tensor_without_values_is_refused():
    with step_of(nn.Linear(3, 2)) as step, pytest.raises(DataError, match=r"shape \(4, 3\), is on the meta device"):
        step(torch.ones(4, 3, device="meta"), torch.ones(4, 2))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("plan", ["data(2)", "zero3(2)", "pipeline(2)"])
def test_a_list_where_forward_takes_a_tensor_is_explained(plan):
    step = cp.parallelize(Two(), sgd, squared_error, strategy=plan)
    with step, pytest.raises(DataError, match=r"list of 1 values, which is one argument: give a tuple"):
        step([torch.ones(4, 3)], torch.ones(4, 2))


def test_inputs_of_another_dtype_than_the_model_are_explained():
    with (
        step_of(Two()) as step,
        pytest.raises(DataError, match=r"are torch.float64, its parameters torch.float32: conv"),
    ):
        step(torch.ones(4, 3, dtype=DOUBLE), torch.ones(4, 2))


def test_inputs_of_another_dtype_than_those_of_the_first_batch_are_refused_where_a_model_is_split():
    with cp.parallelize(Two(), sgd, squared_error, strategy="zero3(2)") as step:
        step(torch.ones(4, 3), torch.ones(4, 2))
        with pytest.raises(DataError, match=r"is torch.float64, and was torch.float32 .*\.to\(torch.float32\)"):
            step(torch.ones(4, 3, dtype=DOUBLE), torch.ones(4, 2))


def test_named_inputs_may_come_in_another_order():
    model = Graph()
    inputs, targets = next(graph_batches())
    adjacency = inputs["adjacency"].expand(4, 4, 4).clone()
    other = copy.deepcopy(model)
    losses = []
    for order, each in ((("x", "adjacency"), model), (("adjacency", "x"), other)):
        with cp.parallelize(each, sgd, squared_error, strategy="pipeline(2)", num_microbatches=2) as step:
            step({"x": inputs["x"], "adjacency": adjacency}, targets)
            losses.append(step({name: {"x": inputs["x"], "adjacency": adjacency}[name] for name in order}, targets))
    assert losses[0] == losses[1]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, parts, scale=None, shift=None):
        hidden = self.first(parts["a"]) - self.first(parts["b"])
        return self.second(hidden if scale is None else hidden * scale) + (0 if shift is None else shift)


@pytest.mark.parametrize(
    ("names", "message"),
    [(("b", "a", "scale"), r"\['b'\].*\['a'\].*, and were .*\['a'\].*\['b'\].*same order"),
     (("a", "b", "shift"), r"\['shift'\], and were .*\['scale'\] when")],
)  # fmt: skip
def test_other_names_and_nests_than_in_the_first_batch_are_refused_where_a_model_is_split(names, message):
    parts, numbers = {"a": torch.ones(4, 3), "b": torch.zeros(4, 3)}, torch.ones(4, 1)
    with cp.parallelize(Nested(), sgd, squared_error, strategy="pipeline(2)") as step:
        step({"parts": parts, "scale": numbers}, torch.ones(4, 2))
        with pytest.raises(DataError, match=message):
            step({"parts": {name: parts[name] for name in names[:2]}, names[2]: numbers}, torch.ones(4, 2))


class Captions(nn.Module):
    """Takes features and a text for each sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, dtype=DOUBLE), nn.Linear(4, 2, dtype=DOUBLE)

    def forward(self, x, texts):
        lengths = torch.tensor([float(len(text)) for text in texts], dtype=DOUBLE)
        return self.second(torch.tanh(self.first(x) + lengths[:, None]))


def weighted_by_names(output, targets):
    weights = torch.tensor([float(len(name)) for name in targets["names"]], dtype=DOUBLE)
    return ((output - targets["y"]).square().mean(1) * weights).mean()


def text_batches(of_texts=tuple):
    for batch in (8, 4, 6):
        names = of_texts("a" * (1 + index % 5) for index in range(batch))
        targets = {"y": torch.randn(batch, 2, dtype=DOUBLE), "names": names}
        yield (torch.randn(batch, 3, dtype=DOUBLE), names), targets


@pytest.mark.long(quick=["data(2)-2-tuple", "solo-1-list", "solo-1-tuple"])
@pytest.mark.parametrize("of_texts", [tuple, list])
@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 1), ("solo", 4), ("data(2)", 1), ("data(2)", 2)])
def test_texts_are_cut_with_their_samples(of_texts, plan, num_microbatches):
    """Each microbatch had read the texts of the whole batch."""
    torch.manual_seed(0)
    model, data = Captions(), list(text_batches(of_texts))
    plain = copy.deepcopy(model)
    expected = train_plainly(plain, weighted_by_names, data)
    with cp.parallelize(model, sgd, weighted_by_names, strategy=plan, num_microbatches=num_microbatches) as step:
        losses = [step(inputs, targets) for inputs, targets in data]
    assert losses == pytest.approx(expected, rel=1e-12)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(relative_difference(param.detach(), other.detach()) for param, other in pairs) < 1e-12


def test_texts_are_gathered_for_a_loss_of_the_whole_batch():
    torch.manual_seed(0)
    model, data = Captions(), list(text_batches())
    expected = train_plainly(copy.deepcopy(model), weighted_by_names, data)
    with cp.parallelize(model, sgd, weighted_by_names, strategy="data(2)", loss_reduction="batch") as step:
        assert [step(inputs, targets) for inputs, targets in data] == pytest.approx(expected, rel=1e-12)


class Scaled(nn.Module):
    """Takes numbers in a list, one for each sample or for all."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=DOUBLE)

    def forward(self, x, numbers):
        values = torch.tensor(numbers, dtype=DOUBLE)
        return self.layer(x) * (values[:, None] if len(values) == len(x) else values.mean())


NUMBERS = (torch.ones(4, 3, dtype=DOUBLE), [1.0, 2.0, 3.0, 4.0]), torch.ones(4, 2, dtype=DOUBLE)


@pytest.mark.parametrize(("plan", "num_microbatches"), [("solo", 2), ("data(2)", 1), ("zero3(2)", 1)])
def test_numbers_that_may_belong_to_samples_are_refused_where_the_batch_is_divided(plan, num_microbatches):
    message = r"numbers has the list \[1.0, .* batch of 4 samples.*batch_dims=\{'numbers': 0\}.*shared=\('numbers',\)"
    with (
        cp.parallelize(Scaled(), sgd, squared_error, strategy=plan, num_microbatches=num_microbatches) as step,
        pytest.raises(DataError, match=message),
    ):
        step(*NUMBERS)


@pytest.mark.parametrize(
    ("plan", "options"),
    [("solo", {}), ("data(2)", {"batch_dims": {"numbers": 0}}), ("data(4)", {"batch_dims": {"numbers": 0}})],
)
def test_numbers_of_samples_are_cut_if_an_option_says_so(plan, options):
    torch.manual_seed(0)
    model = Scaled()
    expected = train_plainly(copy.deepcopy(model), squared_error, [NUMBERS])
    with cp.parallelize(model, sgd, squared_error, strategy=plan, num_microbatches=1, **options) as step:
        assert step(*NUMBERS) == pytest.approx(expected[0], rel=1e-12)


def test_numbers_of_all_samples_stay_whole_if_an_option_says_so():
    torch.manual_seed(0)
    model, (inputs, targets) = Scaled(), NUMBERS
    with cp.parallelize(model, sgd, squared_error, strategy="data(2)", shared=("numbers",)) as step:
        loss = step(inputs, targets)
    torch.manual_seed(0)
    assert loss == pytest.approx(float(F.mse_loss(Scaled().layer(inputs[0]) * 2.5, targets).detach()), rel=1e-12)


def test_texts_that_are_as_long_as_some_batches_only_are_refused():
    """A list of four class names would be cut in a batch of four samples alone."""
    classes = ["cat", "dog", "bird", "fish"]

    def loss(output, targets):
        return ((output - targets["y"]) ** 2).mean() * len(targets["classes"])

    with cp.parallelize(nn.Linear(3, 2), sgd, loss, strategy="data(2)", num_microbatches=1) as step:
        step(torch.ones(6, 3), {"y": torch.ones(6, 2), "classes": classes})
        with pytest.raises(DataError, match=r"classes has the list \['cat'.*shared=\('classes',\)"):
            step(torch.ones(4, 3), {"y": torch.ones(4, 2), "classes": classes})


def sparse(x):
    return x.to_sparse()


def nested(x):
    return torch.nested.nested_tensor([*x[:, None]], layout=torch.jagged)


class Special(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if x.is_nested:
            return self.layer(torch.cat(x.unbind()))
        return torch.sparse.mm(x, self.layer.weight.T) + self.layer.bias


@pytest.mark.parametrize("make", [sparse, nested])
def test_sparse_and_nested_inputs_are_trained_on_undivided_and_else_refused(make):
    x, y = torch.eye(4, 3), torch.ones(4, 2)
    with cp.parallelize(Special(), sgd, squared_error, strategy="solo") as step:
        assert step(make(x), y) > 0
    with (
        cp.parallelize(Special(), sgd, squared_error, strategy="data(2)") as step,
        pytest.raises(DataError, match=r"tensor.* of 4 samples, which cannot be divided.*shared=\(NAME,\)"),
    ):
        step(make(x), y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_inputs_without_a_shape_are_refused():
    with (
        cp.parallelize(Special(), sgd, squared_error, strategy="solo") as step,
        pytest.raises(DataError, match=r"nested tensor of 2 samples.*layout=torch.jagged"),
    ):
        step(torch.nested.nested_tensor([torch.ones(1, 3), torch.ones(2, 3)]), torch.ones(2, 2))
