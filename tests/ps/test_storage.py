"""The rules of the server beside ``torch.optim``, on the same gradients, bit for bit."""

import pytest
import torch

from counterpoint.errors import ProtocolError
from counterpoint.ps.messages import KeySpec
from counterpoint.ps.storage import row_storage as room
from counterpoint.ps.storage.key_storage import DenseStorage, SparseRowStorage
from counterpoint.ps.update_rules import Adagrad, Adam, ConstantInit, NormalInit, Sgd, UniformInit

SGD = [
    Sgd(0.1),
    Sgd(0.1, momentum=0.9),
    Sgd(0.1, 0.9, dampening=0.5, weight_decay=0.01),
    Sgd(0.1, 0.9, weight_decay=0.01, nesterov=True),
]
RULES = [
    *SGD,
    Adagrad(0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5),
    Adam(0.1, weight_decay=0.01),
    Adam(0.1),
]
SPARSE = [Sgd(0.1), Adagrad(0.1, lr_decay=0.1), Adam(0.1)]
DTYPES = ["float64", "float32"]


def torchs(rule: Sgd | Adagrad | Adam, param, *, is_sparse=False):
    match rule:
        case Sgd():
            return torch.optim.SGD(
                [param], rule.lr, rule.momentum, rule.dampening, rule.weight_decay,
                nesterov=rule.nesterov, foreach=False,
            )  # fmt: skip
        case Adagrad():
            return torch.optim.Adagrad(
                [param],
                rule.lr,
                rule.lr_decay,
                rule.weight_decay,
                rule.initial_accumulator_value,
                rule.eps,
                foreach=False,
            )
        case Adam() if is_sparse:
            return torch.optim.SparseAdam([param], rule.lr, (rule.beta1, rule.beta2), rule.eps)
        case Adam():
            return torch.optim.Adam(
                [param], rule.lr, (rule.beta1, rule.beta2), rule.eps, rule.weight_decay, foreach=False
            )


def table(rule, dtype, *, start=None, high=8):
    return SparseRowStorage(KeySpec("table", dtype, 0, high, 3, rule, start or UniformInit(-1, 1)), 0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_range_is_updated_as_torch_does_it(rule, dtype):
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1000, generator=generator, dtype=getattr(torch, dtype))
    kept, param = DenseStorage(KeySpec("weight", dtype, 0, 1000, 0, rule), (first,)), torch.nn.Parameter(first.clone())
    optimizer = torchs(rule, param)
    for step in range(1, 6):
        param.grad = torch.randn(1000, generator=generator, dtype=first.dtype)
        kept.update(step, param.grad, None)
        optimizer.step()
        assert torch.equal(kept.read(None), param.detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", SPARSE, ids=str)
def test_rows_are_updated_as_torch_updates_with_sparse_gradients(rule, dtype):
    kept, everything = table(rule, dtype), torch.arange(8)
    param = torch.nn.Parameter(kept.read(everything).clone())
    optimizer = torchs(rule, param, is_sparse=True)
    for step, rows in enumerate([[1, 4], [0, 1, 7], [4], []], 1):
        values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(step), dtype=param.dtype)
        numbers = torch.tensor(rows, dtype=torch.int64)
        param.grad = torch.sparse_coo_tensor(numbers[None], values, (8, 3), check_invariants=True).coalesce()
        kept.update(step, values, numbers)
        with torch.sparse.check_sparse_tensor_invariants(True):
            optimizer.step()
        assert torch.equal(kept.read(everything), param.detach())


def test_the_momentum_of_a_row_rests_while_it_is_not_pushed():
    kept, row, other = table(Sgd(1.0, momentum=0.5), "float64", start=ConstantInit(0.0)), [2], [5]
    for step, rows in enumerate([row, other, row], 1):
        kept.update(step, torch.ones(1, 3, dtype=torch.float64), torch.tensor(rows))
    assert kept.read(torch.tensor([2, 5]))[:, 0].tolist() == [-2.5, -1.0]


def test_what_was_read_does_not_change_with_the_range():
    kept = DenseStorage(KeySpec("weight", "float32", 0, 2, 0, Sgd(1.0)), (torch.zeros(2),))
    before = kept.read(None)
    kept.update(1, torch.ones(2), None)
    assert before.tolist() == [0, 0]
    assert kept.read(None).tolist() == [-1, -1]


def test_a_range_that_keeps_them_gives_the_numbers_before_its_last_update():
    kept = DenseStorage(KeySpec("weight", "float32", 0, 2, 0, Sgd(1.0)), (torch.zeros(2),), keeps_previous=True)
    first = kept.read(None)
    for step in (1, 2, 3):
        kept.update(step, torch.ones(2), None)
    second = kept.read_previous(None)
    kept.update(4, torch.ones(2), None)
    result = [one.tolist()[0] for one in (first, second, kept.read_previous(None), kept.read(None))]
    assert result == [0, -2, -3, -4]


def test_rows_that_keep_them_are_given_as_they_were_before_the_last_update():
    kept = SparseRowStorage(
        KeySpec("table", "float32", 0, 8, 1, Sgd(1.0), ConstantInit(5.0)), 0, 1, keeps_previous=True
    )
    for step, rows in enumerate(([1, 3], [3, 6]), 1):
        kept.update(step, torch.ones(2, 1), torch.tensor(rows))
    assert kept.read_previous(torch.tensor([1, 3, 6, 7]))[:, 0].tolist() == [4, 4, 5, 5]
    kept.update(3, torch.ones(0, 1), torch.tensor([], dtype=torch.int64))
    assert kept.read_previous(torch.tensor([1, 3, 6, 7]))[:, 0].tolist() == [4, 3, 4, 5]


@pytest.mark.parametrize("start", [UniformInit(-2, 3, seed=4), NormalInit(1.0, 2.0), ConstantInit(0.5)], ids=str)
def test_a_row_is_initialized_the_same_for_any_first_reader(start):
    there, back = table(Sgd(1.0), "float64", start=start), table(Sgd(1.0), "float64", start=start)
    for row in (3, 1, 6):
        there.update(1, torch.zeros(1, 3, dtype=torch.float64), torch.tensor([row]))
    assert torch.equal(there.read(torch.arange(8)), back.read(torch.arange(8)))


def test_a_normal_row_is_normal_and_rows_are_unlike():
    kept = SparseRowStorage(KeySpec("table", "float64", 0, 1 << 40, 8, Sgd(1.0), NormalInit(1.0, 2.0)), 0, 1)
    result = kept.read(torch.arange(0, 1 << 39, 1 << 27))
    assert abs(float(result.mean()) - 1) < 0.05
    assert abs(float(result.std()) - 2) < 0.05
    assert len(result.unique()) == result.numel()


def test_a_table_takes_memory_for_pushed_rows_only():
    kept = table(Adam(), "float32", high=10_000_000)
    before = kept.num_bytes
    kept.read(torch.arange(5000))
    assert (before, kept.num_bytes) == (0, 0)
    kept.update(1, torch.zeros(2, 3), torch.tensor([7, 9_999_999]))
    assert kept.num_bytes == 2 * 3 * 4 * 3


@pytest.mark.parametrize("high", [1000, 1 << 62])
def test_rows_come_back_from_their_parts(high):
    kept = table(Adam(), "float32", high=high)
    kept.update(1, torch.ones(2, 3), torch.tensor([30, 700]))
    kept.update(2, torch.ones(2, 3), torch.tensor([5, 700]))
    again = SparseRowStorage(kept.spec, 0, 1, kept.rows, kept.tensors)
    rows = torch.arange(800)
    assert again.rows.tolist() == [5, 30, 700]
    assert torch.equal(again.read(rows), kept.read(rows))
    for one in (kept, again):
        one.update(3, torch.ones(2, 3), torch.tensor([5, 6]))
    assert torch.equal(again.read(rows), kept.read(rows))


@pytest.mark.parametrize("keeps_earlier", [False, True])
@pytest.mark.parametrize("rule", [Sgd(0.1, momentum=0.9), Adam()], ids=str)
def test_a_snapshot_of_a_range_is_no_copy_and_stays_as_it_was(rule, keeps_earlier):
    kept = DenseStorage(KeySpec("weight", "float32", 0, 4, 0, rule), (torch.zeros(4),), keeps_previous=keeps_earlier)
    kept.update(1, torch.ones(4), None)
    result, before = kept.snapshot(), [part.clone() for part in kept.tensors]
    assert [one.data_ptr() for one in result.tensors] == [own.data_ptr() for own in kept.tensors]
    for step in (2, 3):
        kept.update(step, torch.ones(4), None)
    assert all(map(torch.equal, result.tensors, before))
    assert not any(map(torch.equal, kept.tensors, before))
    assert result.previous is None or result.previous.values.tolist() == [0.0] * 4


def test_a_snapshot_of_rows_is_no_copy_and_stays_as_it_was():
    kept = table(Adagrad(0.1), "float32", high=1000)
    kept.update(1, torch.ones(2, 3), torch.tensor([30, 700]))
    result, again = kept.snapshot(), kept.snapshot()
    before = [part.clone() for part in result.tensors]
    assert [one.data_ptr() for one in result.tensors] == [one.data_ptr() for one in again.tensors]
    kept.update(2, torch.ones(3, 3), torch.tensor([5, 30, 700]))
    assert result.rows.tolist() == [30, 700]
    assert all(map(torch.equal, result.tensors, before))
    assert not torch.equal(kept.read(result.rows), before[0])


def test_memory_is_not_copied_for_a_released_snapshot():
    kept = table(Adagrad(0.1), "float32", high=1000)
    kept.update(1, torch.ones(2, 3), torch.tensor([30, 700]))
    at = kept.snapshot().tensors[0].data_ptr()
    kept.update(2, torch.ones(2, 3), torch.tensor([30, 700]))
    assert kept.snapshot().tensors[0].data_ptr() == at


@pytest.mark.parametrize("rows", [[3, 3], [-1, 2], [2, 8]])
def test_rows_of_a_saved_table_that_cannot_be_are_refused(rows):
    with pytest.raises(ProtocolError, match="rows of table"):
        SparseRowStorage(
            KeySpec("table", "float32", 0, 8, 3, Sgd(0.1), ConstantInit()),
            0,
            1,
            torch.tensor(rows),
            (torch.ones(2, 3),),
        )


@pytest.mark.parametrize(
    ("values", "rows", "result"),
    [
        (torch.ones(1, 3), None, "without row ids"),
        (torch.ones(1, 4), [1], "whose rows have 3"),
        (torch.ones(1, 3, dtype=torch.float64), [1], "which is float32"),
        (torch.full((1, 3), torch.nan), [1], "not finite"),
        (torch.ones(1, 3), [8], "row 8 of table, which has 8"),
    ],
)
def test_a_push_that_does_not_fit_a_table_is_refused(values, rows, result):
    with pytest.raises(ProtocolError, match=result):
        table(Sgd(0.1), "float32").validate_push(values, None if rows is None else torch.tensor(rows))


def test_rows_of_another_shard_are_refused():
    kept = SparseRowStorage(KeySpec("table", "float32", 0, 8, 3, Sgd(0.1), ConstantInit()), 1, 2)
    with pytest.raises(ProtocolError, match="do not belong to shard 1 of 2"):
        kept.validate_push(torch.ones(2, 3), torch.tensor([1, 2]))


def test_numbers_whose_sum_overflows_are_finite():
    kept = DenseStorage(KeySpec("weight", "float32", 0, 2, 0, Sgd(1.0)), (torch.zeros(2),))
    kept.validate_push(torch.full((2,), 3e38), None)
    with pytest.raises(ProtocolError, match="not finite"):
        kept.validate_push(torch.tensor([torch.inf, 0.0]), None)


def test_a_table_grows_as_far_as_there_is_memory(monkeypatch):
    def scarce(shape, dtype):
        if shape[0] > 5:
            raise MemoryError
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(room, "allocate", scarce)
    kept = table(Adagrad(0.1), "float32", high=1000)
    for step, rows in enumerate(([1, 2], [3], [2, 4, 5]), 1):
        kept.update(step, torch.ones(len(rows), 3), torch.tensor(rows))
    assert kept.rows.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("rule", SPARSE, ids=str)
def test_new_rows_and_known_ones_in_one_push_are_updated_as_torch_does_it(rule):
    kept, everything = table(rule, "float64", high=100_000), torch.arange(100_000)
    param = torch.nn.Parameter(kept.read(everything).clone())
    optimizer = torchs(rule, param, is_sparse=True)
    for step, rows in enumerate([everything[::3], everything[1000::2], everything], 1):
        values = torch.randn(len(rows), 3, generator=torch.Generator().manual_seed(step), dtype=param.dtype)
        param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape, check_invariants=True).coalesce()
        kept.update(step, values, rows)
        with torch.sparse.check_sparse_tensor_invariants(True):
            optimizer.step()
        assert torch.equal(kept.read(everything), param.detach())
