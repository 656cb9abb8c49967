"""The error-feedback residual is saved with a run: the same plan continues bit for bit, another one leaves it out."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from counterpoint.checkpoint import Checkpoint, step_folders
from counterpoint.runtime.state_dict import is_error_feedback
from tests.training.trainers import StopAt, build_seeded, dataset, equal_bits, fit, make_generator, max_difference

CODED = ["data(2, compress=int8)", "data(4, compress=powersgd:2)", "pipeline(2) * data(2, compress=topk:0.1)",
         "data(2) * data(2, compress=sign)", "data(2, compress=int8) * data(2, sync_every=3)"]  # fmt: skip


def interrupted(folder, strategy):
    with pytest.raises(KeyboardInterrupt):
        fit(strategy, epochs=2, fit_options={"checkpoint_dir": folder, "save_every": 2}, callbacks=[StopAt(2)])


@pytest.mark.long(quick=["pipeline(2) * data(2, compress=topk:0.1)"])
@pytest.mark.parametrize("strategy", CODED)
def test_an_interrupted_run_continues_bit_for_bit(strategy, tmp_path):
    whole, _ = fit(strategy, epochs=2)
    interrupted(tmp_path, strategy)
    assert equal_bits(fit(strategy, epochs=2, fit_options={"resume": tmp_path})[0], whole)


@pytest.mark.long(quick=["data(4, compress=int8)"])
@pytest.mark.parametrize("after", ["data(2)", "data(2, compress=sign)", "data(4, compress=int8)", "solo"])
def test_another_plan_drops_it_with_a_warning(after, tmp_path):
    interrupted(tmp_path, "data(2, compress=int8)")
    note = rf"^step-00000002 was saved under data\(2, compress=int8\), whose ranks had error-feedback residuals .*; {after[:4]}"
    with pytest.warns(RuntimeWarning, match=note):
        result, history = fit(after, epochs=2, fit_options={"resume": tmp_path})
    assert [step.step for step in history.steps] == list(range(2, 8))
    assert 0 < max_difference(result, fit("data(2)", epochs=2)[0]) < 0.1


def test_a_run_without_a_code_continues_with_one_and_saves_nothing_of_it(tmp_path):
    interrupted(tmp_path, "data(2)")
    fit("data(2, compress=int8)", epochs=2, fit_options={"resume": tmp_path})
    assert not [name for name in Checkpoint.open(step_folders(tmp_path)[-1]).names() if is_error_feedback(name)]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.table(tokens))


@pytest.mark.long(quick=["powersgd:1-pipeline(2) * ", "bf16-"])
@pytest.mark.parametrize("inner", ["", "pipeline(2) * "])
@pytest.mark.parametrize("code", ["bf16", "int8", "powersgd:1"])
def test_rows_of_tables_with_sparse_gradients_are_summed_as_they_are(code, inner):
    """In the first step the table is as without a code; the head is not."""
    tokens = TensorDataset(torch.randint(0, 10, (24, 4), generator=make_generator()), dataset(24).tensors[1])
    sgd = {"optimizer": partial(optim.SGD, lr=0.1), "fit_options": {"max_steps": 1}}
    plain, coded = (
        fit(f"{inner}data(2{how})", build_seeded(Bag), tokens, **sgd)[0] for how in ("", f", compress={code}")
    )
    assert max_difference(coded, plain, ["table.weight"]) <= 1e-15
    assert max_difference(coded, plain, ["head.weight"]) > 1e-6
