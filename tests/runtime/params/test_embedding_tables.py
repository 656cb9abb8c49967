"""Gradients of embedding tables, published and added up as rows, give the weights of single-process training."""

import pytest
import torch
import torch.nn.functional as F

import counterpoint as cp
from counterpoint.runtime.params.sparse_grads import RowGrad, add_rows, clear_rows
from counterpoint.strategies.pipeline.schedules.registry import SCHEDULES
from tests.covering import each_value_once
from tests.process.forked_ranks import run_forked
from tests.runtime import embedding_models as tables
from tests.runtime.embedding_models import (
    ADAGRAD,
    ADAM,
    CASES,
    MOMENTUM,
    SGD,
    DeepTiedEmbeddingNet,
    EmbeddingBagNet,
    EmbeddingNet,
    TiedEmbeddingNet,
    bags,
    max_difference,
    rows,
)  # fmt: skip

BAR = 1e-12
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, once in a process


@pytest.mark.long(quick=["dense-{'clip_norm': 0.05}"])
@pytest.mark.parametrize(
    ("case", "options"),
    each_value_once(
        [*CASES],
        [{}, {"clip_norm": 0.05}, {"clip_value": 1e-3}, {"num_microbatches": 2}, {"share_params_on_host": False}],
    ),
    ids=str,
)
def test_replicas_that_look_up_rows_train_as_a_single_process(case, options):
    assert max_difference("data(2)", *CASES[case], **options) <= BAR


OTHER_PLANS = ["zero(2, level=1)", "zero(2, level=2)", "zero(2, level=3)", "server(2)",
               "data(2, update=sharded) * data(2)", "zero(2, level=2) * data(2)"]  # fmt: skip


@pytest.mark.long(quick=["sparse adam-zero(2, level=2) * data(2)", "sgd-server(2)"])
@pytest.mark.parametrize(
    ("case", "strategy"), each_value_once(["sgd", "momentum", "sparse adam"], OTHER_PLANS), ids=str
)
def test_every_other_plan_trains_tables_as_a_single_process(case, strategy):
    assert max_difference(strategy, *CASES[case]) <= BAR


@pytest.mark.long(quick=["sgd-data(2) * data(2)"])
@pytest.mark.parametrize("strategy", ["data(2) * data(2)", "data(2) * server(2)"])
@pytest.mark.parametrize("case", ["sgd", "dense", "momentum", "sparse adam"])
def test_rows_that_are_gathered_twice_are_those_of_a_single_process(case, strategy):
    assert max_difference(strategy, *CASES[case], share_params_on_host=False) <= BAR


@pytest.mark.long(quick=["sgd-pipeline(2) * data(2)"])
@pytest.mark.parametrize("strategy", ["pipeline(2)", "pipeline(2) * data(2)"])
@pytest.mark.parametrize("case", ["sgd", "dense", "adagrad"])
def test_pipelines_train_tables_as_a_single_process(case, strategy):
    assert max_difference(strategy, *CASES[case]) <= BAR


@pytest.mark.long(quick=["zero_bubble 1-overlap", "interleaved 2-none"])
@pytest.mark.parametrize("passes", [None, ()], ids=["overlap", "none"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: f"{one.name} {one.chunk_counts.start}")
def test_a_sparse_table_of_two_stages_trains_as_a_single_process(schedule, passes):
    """Rows were gathered where a reduction starts, for which a stage waited that waited for the other's activations."""
    plan = f"pipeline(2, schedule={schedule.name}, chunks_per_stage={schedule.chunk_counts.start})"
    options = {"num_microbatches": 2, "passes": passes}
    assert max_difference(plan, DeepTiedEmbeddingNet, rows(sparse=True), MOMENTUM, **options) <= BAR


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAGRAD, ADAM], ids=["sgd", "momentum", "adagrad", "adam"])
def test_a_table_that_is_the_output_layer_too_gets_both_gradients(optimizer):
    assert max_difference("data(2)", TiedEmbeddingNet, rows(), optimizer) <= BAR


@pytest.mark.long(quick=["table3", "table2", "table1"])
@pytest.mark.parametrize(
    "table",
    [rows(padding_idx=2), rows(padding_idx=2, sparse=True), rows(padding_idx=-1), bags(mode="sum"),
     bags(mode="max"), bags(padding_idx=2), bags(mode="sum", sparse=True, padding_idx=2)],
)  # fmt: skip
def test_every_kind_of_lookup_trains_as_a_single_process(table):
    assert max_difference("data(2)", EmbeddingNet, table, SGD) <= BAR


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_several_lengths_train_as_a_single_process(mode, last):
    assert max_difference("data(2)", EmbeddingBagNet, bags(mode=mode, include_last_offset=last), SGD) <= BAR


@pytest.mark.process
def test_processes_read_each_others_rows():
    cases = ["sgd", "dense", "momentum", "sparse adam"]
    for result in run_forked(tables.train_cases, ranks=2, args=[cases]):
        for case, weights in zip(cases, result, strict=True):
            solo = tables.trained("solo", *CASES[case])
            assert float((weights - solo).norm() / solo.norm()) <= BAR


@pytest.mark.long(quick=["sparse adam"])
@pytest.mark.parametrize("case", ["dense", "momentum", "sparse adam"])
def test_a_skipped_step_leaves_no_rows(case):
    def poisoned(outputs, targets):
        result = F.cross_entropy(outputs, targets)
        return result * float("nan") if outputs.shape[0] == 1 else result  # the ranks with a sample of the third batch

    build, table, optimizer = CASES[case]
    left_out = tables.trained("data(2)", build, table, optimizer, loss=poisoned, nonfinite="skip")
    without = tables.trained("data(2)", build, table, optimizer, left_out=2)
    assert float((left_out - without).norm() / without.norm()) <= BAR


@pytest.mark.long(quick=["sparse adam"])
@pytest.mark.parametrize("case", ["sgd", "momentum", "adagrad", "sparse adam"])
def test_a_run_with_tables_resumes_bit_for_bit_from_a_checkpoint(case, tmp_path):
    result = []
    for name, resume, steps in [("a", None, 4), ("b", None, 2), ("b", tmp_path / "b", 4)]:
        build, table, optimizer = CASES[case]
        model = tables.build_seeded(build, table)
        with cp.Trainer(model, loss=F.cross_entropy, optimizer=optimizer, strategy="data(2)") as one:
            one.fit(tables.dataset(), batch_size=8, max_steps=steps, checkpoint_dir=tmp_path / name, resume=resume)
        result.append(model.table.weight.detach().clone())
    assert torch.equal(result[0], result[2])
    assert not torch.equal(result[0], result[1])


def test_rows_are_added_to_a_range_and_nothing_outside_of_it():
    flat = torch.zeros(10, dtype=torch.float64)
    row_grad = RowGrad(torch.tensor([3, -1, 1, 3]), torch.arange(1.0, 5.0).double().view(2, 2), rows_per_value=2)
    add_rows(flat[2:7], 3, [row_grad], 2.0)  # the second element of row 1 to the second of row 3
    assert flat.tolist() == [0, 0, 8.0, 0, 0, 0 + 2 + 6, 4 + 8.0, 0, 0, 0][:10]
    clear_rows(flat[2:7], 3, [row_grad])
    assert not flat.any()


class OwnGradientPenalty(EmbeddingNet):
    """Asks autograd for the table's gradient by itself."""

    def forward(self, tokens):
        result = super().forward(tokens)
        if not torch.is_grad_enabled():
            return result
        (asked,) = torch.autograd.grad(result.square().sum(), self.table.weight, create_graph=True)
        return result + asked.sum()


def test_a_gradient_requested_from_autograd_is_a_tensor_of_its_own():
    assert max_difference("data(2)", OwnGradientPenalty, rows(), SGD, num_microbatches=2) <= BAR
