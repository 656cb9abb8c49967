"""Plans with compile=: the numbers of eager forwards, one graph for each part of the model, or an error with the line."""

import logging
import re
from functools import partial
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import counterpoint as cp
from counterpoint.jobs.models import GPT, GPTShape
from counterpoint.program.instruction import Forward, Recompute
from counterpoint.testing.device_survey import (
    MODEL_PLANS,
    OTHER_NAMES,
    PLANS,
    TOLERANCE,
    batches,
    build,
    largest_difference,
    make_step,
)
from tests.training.compile_backend import reset_counter
from tests.training.trainers import state_of

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 4
COUNTED = "segments(backend=counting)"


@pytest.fixture(name="counter", autouse=True)
def count_graphs():
    yield reset_counter()
    reset_counter()


def train(model, plan, num_steps=NUM_STEPS, **options):
    """Return the losses and trained values of a few steps of a model of the survey."""
    step, trained = make_step(model, plan, "cpu", **options)
    with step:
        losses = [float(step(*batch)) for batch in islice(batches(model), num_steps)]
    return losses, state_of(trained)


def has_pairs(model, plan):
    return "tensor" not in plan or model == "gpt"


@pytest.mark.long(quick=["mlp-pipeline(2) + recompute"])
@pytest.mark.parametrize(
    ("model", "plan"),
    [("mlp", plan) for plan in PLANS if has_pairs("mlp", plan)]
    + [(model, plan) for model in ("gpt", "embedding", "experts") for plan in MODEL_PLANS if has_pairs(model, plan)],
)
def test_a_plan_trains_as_without_compilation(model, plan, counter):
    actual = train(model, plan, compile=COUNTED)
    assert counter.num_calls >= NUM_STEPS
    assert largest_difference(actual, train(model, plan)) <= TOLERANCE


def make_gpt(num_layers=4, dropout=0.2):
    torch.manual_seed(0)
    return GPT(GPTShape(num_layers, width=8, head_dim=4, context=4, num_tokens=11, dropout=dropout)).double()


def token_loss(output, targets):
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def run_steps(model, plan, data=None, loss=F.cross_entropy, **options):
    """Return the losses of some steps, 3 by default."""
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with cp.parallelize(model, optimizer, loss, strategy=plan, timeout_s=20.0, **options) as step:
        return [float(step(*batch)) for batch in data or islice(batches("mlp"), 3)]


@pytest.mark.long(quick=["pipeline(2)-blocks-3-24"])
@pytest.mark.parametrize(
    ("plan", "parts", "num_graphs", "calls_per_step"),
    [
        ("solo", "segments", 1, 1),
        ("data(2)", "segments", 1, 2),  # both ranks share it
        ("solo", "blocks", 3, 6),  # embedding, block, head
        ("zero(2, level=3)", "segments", 3, 12),
        ("pipeline(2)", "segments", 3, 12),
        ("pipeline(2)", "blocks", 3, 24),
    ],
)
def test_identical_blocks_share_a_graph_and_nothing_is_compiled_again(plan, parts, num_graphs, calls_per_step, counter):
    counts = []
    optimizer = partial(optim.SGD, lr=0.1)
    model = make_gpt()
    compilation = f"{parts}(backend=counting)"
    with cp.parallelize(model, optimizer(model.parameters()), token_loss, strategy=plan, compile=compilation) as step:
        for batch in islice(batches("gpt"), 3):
            step(*batch)
            counts.append((counter.num_graphs, counter.num_calls))
    assert counts == [(num_graphs, calls_per_step * number) for number in (1, 2, 3)]


def fits(model, plan):
    """Tell whether a plan trains the model: weights that stages share need a flush, and placements name modules."""
    needs = ("schedule=pipedream", "pipedream(", "pipedream_2bw", "placement")
    return model == "mlp" or not any(name in plan for name in needs)


def count_by_step(model, plan, parts, counter):
    """Return the graphs after, and the calls in, each of five steps, and the forwards of blocks in a step."""
    step, _ = make_step(model, plan, "cpu", compile=f"{parts}(backend=counting)")
    counts = [(0, 0)]
    with step:
        for batch in batches(model):
            step(*batch)
            counts.append((counter.num_graphs, counter.num_calls))
        assert step.local_ranks.compiled is not None
        lines = [line for rank in step.local_ranks.compiled.program.rank_programs for line in rank.body]
    graphs = [num_graphs for num_graphs, _ in counts[1:]]
    calls = [after - before for (_, before), (_, after) in pairwise(counts)]
    return graphs, calls, sum(isinstance(line, Forward | Recompute) for line in lines)


@pytest.mark.long(quick=["mlp-data(2)", "gpt-pipeline(2, schedule=zero_bubble)"])
@pytest.mark.parametrize(
    ("model", "plan"),
    [(model, plan) for model in ("mlp", "gpt") for plan in dict.fromkeys((*PLANS, *OTHER_NAMES)) if fits(model, plan)],
)
def test_every_plan_calls_a_graph_for_each_part_and_compiles_nothing_after_the_second_step(model, plan, counter):
    """Plain torch calls a graph of a block once for each of its forwards; a graph break would be further graphs."""
    graphs, calls, num_forwards = count_by_step(model, plan, "blocks", counter)
    assert graphs[1:] == graphs[1:2] * 4
    assert calls[1:] == [num_forwards] * 4
    reset_counter()
    fused_graphs, fused_calls, _ = count_by_step(model, plan, "segments", counter)
    assert fused_graphs[1:] == fused_graphs[1:2] * 4
    assert fused_calls[1:] == fused_calls[1:2] * 4
    assert fused_calls[1] <= num_forwards
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.long
@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_an_uneven_last_batch_is_a_second_graph(plan, counter):
    data = list(islice(batches("gpt"), 4))
    data = [*data[:2], *((inputs[:3], targets[:3]) for inputs, targets in data[2:])]
    losses = run_steps(make_gpt(1), plan, data, token_loss, num_microbatches=1, compile=COUNTED)
    compiled_for = counter.num_graphs
    assert losses == pytest.approx(run_steps(make_gpt(1), plan, data, token_loss, num_microbatches=1), rel=1e-12)
    run_steps(make_gpt(1), plan, data[:1] * 4, token_loss, num_microbatches=1, compile=COUNTED)
    assert compiled_for == 2 * (counter.num_graphs - compiled_for)


class Recomputed(nn.Module):
    """Blocks with torch.utils.checkpoint and dropout, and a loss of its own if it gets targets."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def make_seeded(kind):
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.long(quick=["data(2)-eager"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "pipeline(2)"])
def test_checkpoints_recompute_with_the_masks_of_their_forward(plan, backend):
    actual, expected = make_seeded(Recomputed), make_seeded(Recomputed)
    run_steps(actual, plan, compile=f"segments(backend={backend})")
    run_steps(expected, plan)
    assert largest_difference(([], state_of(actual)), ([], state_of(expected))) <= TOLERANCE


@pytest.mark.long(quick=["bf16-data(2)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)", "pipeline(2)"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_that_a_checkpoint_calls_are_cast_in_a_graph(precision, plan):
    """A forward collected the casts that it read in a list, which torch does not allow inside of a checkpoint."""
    actual, expected = make_seeded(Recomputed), make_seeded(Recomputed)
    run_steps(actual, plan, precision=precision, compile="segments(backend=aot_eager)")
    run_steps(expected, plan, precision=precision)
    assert largest_difference(([], state_of(actual)), ([], state_of(expected))) == 0


class RecomputedTable(Recomputed):
    """Looks up rows inside of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)

    def forward(self, x):
        return super().forward(x + checkpoint(self.table, (x[:, 0] > 0).long(), use_reentrant=False))


@pytest.mark.parametrize("plan", ["data(2)", "zero(2, level=3)"])
def test_a_table_whose_rows_are_cast_compiles_inside_of_a_checkpoint(plan):
    actual, expected = make_seeded(RecomputedTable), make_seeded(RecomputedTable)
    run_steps(actual, plan, precision="bf16", compile="segments(backend=aot_eager)")
    run_steps(expected, plan, precision="bf16")
    assert largest_difference(([], state_of(actual)), ([], state_of(expected))) == 0


class RecomputedRecurrent(Recomputed):
    """Calls a recurrent layer inside of a checkpoint."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x):
        output, _ = checkpoint(self.recurrent, x[:, None], use_reentrant=False)
        return super().forward(x + output[:, 0])


@pytest.mark.long(quick=["bf16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_recurrent_layer_that_is_cast_in_a_checkpoint_names_remedies_that_run(precision):
    backend = "segments(backend=aot_eager)"
    with pytest.raises(cp.PlanError, match="whose recurrent layer 'recurrent' is called by") as caught:
        run_steps(make_seeded(RecomputedRecurrent), "data(2)", precision=precision, compile=backend)
    remedies = re.findall(r"(precision|compile)='(\S+)'(?= or|,)", str(caught.value).partition("; give ")[2])
    assert [name for name, _ in remedies] == ["precision", "compile"]
    for remedy in remedies:
        options = {"precision": precision, "compile": backend, **dict([remedy])}
        actual, expected = make_seeded(RecomputedRecurrent), make_seeded(RecomputedRecurrent)
        run_steps(actual, "data(2)", **options)
        run_steps(expected, "data(2)", precision=options["precision"])
        assert largest_difference(([], state_of(actual)), ([], state_of(expected))) == 0


class NarrowInside(nn.Module):
    """Dropout in an autocast of its own, which a trace has as one operation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            with torch.autocast("cpu", torch.bfloat16):
                x = x + layer(x)
        return self.head(x)


@pytest.mark.long(quick=["pipeline(2)"])
@pytest.mark.parametrize("plan", ["pipeline(2)", "zero(2, level=3)"])
def test_draws_inside_an_autocast_are_those_of_eager_forwards(plan):
    actual, expected = make_seeded(NarrowInside), make_seeded(NarrowInside)
    run_steps(actual, plan, compile=COUNTED)
    run_steps(expected, plan)
    assert largest_difference(([], state_of(actual)), ([], state_of(expected))) <= TOLERANCE


def shared_block():
    block, other = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)) for _ in range(2))
    return nn.Sequential(Block(block), Block(other), block_twice := Block(block), block_twice, nn.Linear(8, 4))


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


@pytest.mark.long(quick=["pipeline(2)-blocks(backend=counting)"])
@pytest.mark.parametrize("compilation", [COUNTED, "blocks(backend=counting)"])
@pytest.mark.parametrize("plan", ["solo", "pipeline(2)"])
def test_modules_that_run_several_times_have_the_masks_of_each_call(plan, compilation):
    actual, expected = make_seeded(shared_block), make_seeded(shared_block)
    run_steps(actual, plan, compile=compilation)
    run_steps(expected, plan)
    assert largest_difference(([], state_of(actual)), ([], state_of(expected))) <= TOLERANCE


@pytest.mark.long(quick=["mlp-solo-bf16"])
@pytest.mark.parametrize("precision", ["bf16", "bf16(autocast=true)"])
@pytest.mark.parametrize("plan", ["solo", "pipeline(2)", "zero(2, level=3)"])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_graphs_compute_in_the_precision_of_the_plan(model, plan, precision, counter):
    actual = train(model, plan, 2, precision=precision, compile=COUNTED)
    assert counter.num_calls
    assert largest_difference(actual, train(model, plan, 2, precision=precision)) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("plan", ["solo", "zero(2, level=3)", "pipeline(2)", "pipeline(2) + recompute", "tensor(2)"])
def test_graphs_with_backwards_of_their_own_train_the_same(plan):
    actual = train("gpt", plan, 3, compile="segments(backend=aot_eager)")
    assert largest_difference(actual, train("gpt", plan, 3)) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_inductor_trains_the_same():
    assert (
        largest_difference(train("gpt", "pipeline(2)", 2, compile="segments"), train("gpt", "pipeline(2)", 2)) <= 1e-9
    )


def test_evaluation_is_compiled_too(counter):
    dataset = TensorDataset(torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,)))
    losses = []
    for compilation in (None, COUNTED):
        model = build("mlp")
        trainer = cp.Trainer(model, loss=F.cross_entropy, optimizer=partial(optim.SGD, lr=0.1), compile=compilation)
        with trainer:
            trainer.fit(dataset, batch_size=4, epochs=1)
            before = counter.num_calls
            losses.append(trainer.evaluate(dataset)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert counter.num_calls > before > 0


class Branching(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y


class Logging(nn.Linear):
    def forward(self, x):
        logging.getLogger("model").info("forward")
        return super().forward(x)


LOGGER = logging.getLogger("model")


class WarningLinear(nn.Linear):
    def forward(self, x):
        LOGGER.warning("forward")
        return super().forward(x)


class OwnLoss(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return F.cross_entropy(output, output.detach().argmax(-1))


class Shuffling(nn.Linear):
    def forward(self, x):
        return super().forward(x[torch.randperm(len(x))])


def normalized():
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("make", "plan", "options", "text"),
    [
        (partial(Branching, 8, 4), "solo", {}, "cannot compile Branching as one graph: Data-dependent branching, at "),
        (partial(Branching, 8, 4), "solo", {}, "in forward: return y * 2 if y.sum() > 0 else y; change this line"),
        (partial(Logging, 8, 4), "solo", {}, "test_compile.py"),
        (
            partial(Logging, 8, 4),
            "solo",
            {},
            'in forward: logging.getLogger("model").info("forward"); change this line',
        ),
        (partial(Shuffling, 8, 4), "solo", {}, "the random numbers of Shuffling come from torch's randperm, which are"),
        (normalized, "data(2)", {"batch_norm": "deferred"}, "compile= compiles batch norm as it is, but under this"),
        (partial(nn.Linear, 8, 4), "solo", {"compile": "segments(backend=nosuch)"}, "Invalid backend: 'nosuch'"),
        (partial(nn.Linear, 8, 4), "solo", {"compile": "segments(mode=nosuch)"}, "does not take compile=segments(mode"),
    ],
)
def test_what_cannot_be_compiled_is_refused(make, plan, options, text):
    with pytest.raises(cp.PlanError, match=re.escape(text)):
        run_steps(make_seeded(make), plan, **{"compile": COUNTED, "cross_sample": "accept", **options})


def test_messages_of_a_library_can_be_left_out_of_graphs():
    """The line is one of transformers, say, which users cannot change."""
    remedy = "torch._dynamo.config.ignore_logger_methods.add(logging.Logger.warning), or drop compile="
    with pytest.raises(cp.PlanError, match=re.escape(remedy)):
        run_steps(make_seeded(partial(WarningLinear, 8, 4)), "solo", compile=COUNTED)
    ignored: Any = torch._dynamo.config.ignore_logger_methods
    ignored.add(logging.Logger.warning)
    try:
        assert run_steps(make_seeded(partial(WarningLinear, 8, 4)), "solo", compile=COUNTED)
    finally:
        ignored.discard(logging.Logger.warning)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lstm_that_torch_cannot_differentiate_in_a_graph_is_refused(dtype):
    """It was an AssertionError of torch; in float64, and with backend=eager, it trains."""
    data = [(x[:, None].to(dtype), y) for x, y in islice(batches("mlp"), 2)]

    def run(kind, backend):
        return run_steps(Recurrent(kind).to(dtype), "pipeline(2)", data, compile=f"segments(backend={backend})")

    with pytest.raises(
        cp.PlanError, match=r"because torch has no compiled nn\.LSTM in float32, bf16 and fp16 on a CPU;"
    ):
        run(nn.LSTM, "aot_eager")
    assert run(nn.LSTM, "eager")
    assert run(nn.GRU, "aot_eager")


@pytest.mark.long(quick=["GRU-data(2)"])
@pytest.mark.parametrize("plan", ["solo", "data(2)", "zero(2, level=3)"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM], ids=lambda kind: kind.__name__)
def test_recurrent_layers_are_compiled_where_the_model_runs_as_python(kind, plan):
    """Torch refuses to trace them, unless it is asked to."""
    data = [(x[:, None], y) for x, y in islice(batches("mlp"), 3)]

    def run(compilation):
        torch.manual_seed(0)
        return run_steps(nn.Sequential(Recurrent(kind)).double(), plan, data, compile=compilation)

    assert run("segments(backend=aot_eager)") == pytest.approx(run(None), rel=1e-12)


class TokenModel(nn.Module):
    """A model that returns its own mean over the tokens that count, and also another number in between.

    Args:
        loss: from logits and labels.
        weights: of the tokens in the loss; None for 1.
    """

    def __init__(self, loss, weights=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))
        self.loss = loss
        self.register_buffer("weights", weights)

    def forward(self, tokens, labels):
        logits = self.layers(tokens)
        return {"logits": logits, "loss": self.loss(logits.flatten(0, 1), labels.flatten(), self.weights)}


def make_token_model(loss):
    weights = torch.rand(11, generator=torch.Generator().manual_seed(1)) if loss is F.nll_loss else None
    return make_seeded(partial(TokenModel, loss, weights))


def make_module(logits, labels, _):
    """Compute it as most models of transformers do, by a module that each forward makes."""
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    return criterion(logits, labels.where(labels >= 0, -1))


def own_loss(output, _):
    return output["loss"]


def token_batches():
    """Every sample has another number of tokens that count, and two of a batch have none."""
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        tokens = torch.randint(11, (4, 6), generator=generator)
        labels = tokens.where(torch.arange(6) < torch.tensor([[5], [0], [2], [step]]), -100)
        yield (tokens, labels), labels


def train_tokens(plan, loss, **options):
    model = make_token_model(loss)
    losses = run_steps(model, plan, token_batches(), own_loss, **options)
    return losses, state_of(model)


@pytest.mark.long(quick=["data(2)-make_module", "pipeline(2)-cross_entropy"])
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss, make_module], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    "plan", ["solo", "data(2)", "zero(2)", "zero(2, level=3)", "pipeline(2)", "pipeline(2) * data(2)"]
)
def test_a_mean_over_tokens_that_the_model_computes_is_that_of_the_whole_batch(plan, loss):
    """It was refused, and a loss module that the forward makes was silently averaged over samples."""
    expected = train_tokens("solo", loss)
    for parts in ("segments", "blocks") if plan != "solo" else ("segments",):
        actual = train_tokens(plan, loss, compile=f"{parts}(backend=aot_eager)")
        assert largest_difference(actual, expected) <= 1e-12


@pytest.mark.long
def test_inductor_computes_the_mean_of_the_whole_batch():
    actual = train_tokens("data(2)", make_module, compile="segments")
    assert largest_difference(actual, train_tokens("solo", make_module)) <= 1e-12


@pytest.mark.parametrize("plan", ["solo", "data(2)"])
def test_a_batch_without_a_target_that_counts_has_the_loss_of_an_eager_one(plan):
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    data = [((tokens, torch.full_like(tokens, -100)), tokens)]
    eager, compiled = (
        run_steps(make_token_model(make_module), plan, data, own_loss, nonfinite="skip", **options)
        for options in ({}, {"compile": COUNTED})
    )
    assert str(compiled) == str(eager)


@pytest.mark.long(quick=["fp16-data(2)"])
@pytest.mark.parametrize("plan", ["data(2)", "pipeline(2)"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mean_that_is_cast_to_the_output_dtype_is_still_the_mean_of_the_batch(plan, precision):
    """It was refused also without compile=; a graph in fp16 would have divided by 0 where no token counts."""

    def train_narrow(plan, **options):
        model, data = make_token_model(make_module).float(), token_batches()
        return run_steps(model, plan, data, lambda output, _: output["loss"].float(), precision=precision, **options)

    eager, compiled = (train_narrow(plan, compile=name) for name in (None, "segments(backend=aot_eager)"))
    assert compiled == pytest.approx(eager, rel=1e-2)
    assert eager == pytest.approx(train_narrow("solo"), rel=2e-2)


def test_means_add_no_graph_after_the_first_step(counter):
    counts = []
    model = make_token_model(make_module)
    with cp.parallelize(
        model, optim.SGD(model.parameters(), lr=0.1), own_loss, strategy="data(2)", compile=COUNTED
    ) as step:
        for inputs, labels in token_batches():
            step(inputs, labels)
            counts.append(counter.num_graphs)
    assert counts == [1, 1, 1]


class MeanBefore(nn.Module):
    """A model whose loss is computed from a mean of its first layers."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x):
        mean = F.cross_entropy(self.before(x), x.argmax(-1))
        return self.after(x * mean).mean()


def test_a_mean_before_the_last_graph_is_refused_where_a_batch_is_divided():
    with pytest.raises(
        cp.DataError, match=r"inside of a graph of compile= that is not its last one, so that its output"
    ):
        run_steps(
            make_seeded(MeanBefore),
            "pipeline(2)",
            loss=lambda output, _: output,
            compile=COUNTED,
            cross_sample="accept",
        )


class MeanInCheckpoint(nn.Module):
    """Computes its loss in torch's checkpoint."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        def compute_loss(hidden):
            return F.cross_entropy(self.head(hidden), x.argmax(-1))

        return checkpoint(compute_loss, torch.tanh(self.layer(x)), use_reentrant=False)


def test_a_mean_inside_of_a_checkpoint_compiles_where_no_batch_is_divided_and_is_refused_elsewhere():
    run = partial(run_steps, loss=lambda output, _: output)
    expected = run(make_seeded(MeanInCheckpoint), "solo")
    assert run(make_seeded(MeanInCheckpoint), "solo", compile=COUNTED) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(cp.DataError, match=r"inside of torch's checkpoint in a graph of compile="):
        run(make_seeded(MeanInCheckpoint), "data(2)", compile=COUNTED)


@pytest.mark.long(quick=["data(2)-True"])
@pytest.mark.parametrize(
    ("plan", "stays"),
    [("solo", True), ("data(2)", True), ("pipeline(2)", True), ("zero(2)", True), ("zero(2, level=3)", False)],
)
def test_a_graph_has_one_shape_and_reads_weights_where_they_are(plan, stays, counter):
    """A CUDA graph depends on both; weights that ranks gather are elsewhere in the next step."""
    model = make_seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    data = [(torch.randn(size, 4).double(), torch.randint(4, (size,))) for size in (8, 8, 4, 8)]
    run_steps(model, plan, data, compile="segments(backend=static)")
    assert counter.num_other_shapes == 0
    assert counter.num_calls > counter.num_graphs > 0
    assert all(len(addresses) == 1 for addresses in counter.addresses.values()) == stays


def test_too_many_shapes_are_refused():
    data = [(torch.randn(size, 8, dtype=torch.float64), torch.randint(4, (size,))) for size in range(2, 13)]
    with pytest.raises(
        cp.PlanError, match=r"for 8 kinds of inputs, which is torch's limit; give batches of few shapes"
    ):
        run_steps(make_seeded(partial(nn.Linear, 8, 4)), "solo", data, compile=COUNTED)


def test_a_model_that_is_compiled_already_is_refused():
    model = torch.compile(make_seeded(partial(nn.Linear, 8, 4)), backend="eager")
    with pytest.raises(
        cp.PlanError, match=r"Linear is compiled with torch.compile, and compile=segments\(backend=count"
    ):
        run_steps(model, "solo", compile=COUNTED)
