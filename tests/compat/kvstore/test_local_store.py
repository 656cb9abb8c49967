"""Stores of one process, and what every store refuses."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, RMSprop

from counterpoint.compat import kvstore
from counterpoint.compat.kvstore.compression import GradientCompressor, OneBit, TwoBit
from counterpoint.errors import CheckpointError, PlanError
from counterpoint.value_codec import decode_value, encode_value
from tests.compat.kvstore.store_helpers import pull, sparse_rows


@pytest.fixture
def kv():
    """Return a store with a dense key and one of rows."""
    store = kvstore.create("local")
    store.init(["w", "e"], [torch.zeros(2), sparse_rows([1], [1.0], 4)])
    return store


def test_any_torch_optimizer_updates_a_local_store(kv):
    kv.set_optimizer(partial(RMSprop, lr=0.1))
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = RMSprop([param], lr=0.1)
    for gradient in (torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])):
        kv.push("w", [gradient / 2, gradient / 2])
        param.grad = gradient
        optimizer.step()
    assert torch.equal(pull(kv, "w", 2), param.detach())


@pytest.mark.parametrize("kind", [partial(SGD, lr=0.1, momentum=0.9), partial(Adam, lr=0.1)])
def test_saved_states_continue_in_another_store(kv, kind, tmp_path):
    kv.set_optimizer(kind)
    both = [torch.tensor([1.0, 2.0]), sparse_rows([1, 2], [1.0, 2.0], 4)]
    kv.push(["w", "e"], both)
    kv.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    other = kvstore.create("local")
    other.init(["w", "e"], [pull(kv, "w", 2), pull(kv, "e", 4, 2).to_sparse(1)])
    other.set_optimizer(partial(kind, lr=0.7))
    other.load_optimizer_states(tmp_path / "states")
    for store in (kv, other):
        store.push(["w", "e"], both)
    assert torch.equal(pull(kv, "w", 2), pull(other, "w", 2))
    assert [file.name for file in tmp_path.iterdir()] == ["states"]


def test_states_of_another_optimizer_are_refused(kv, tmp_path):
    kv.set_optimizer(partial(SGD, lr=0.1))
    kv.push("w", torch.ones(2))
    kv.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    kv.set_optimizer(partial(Adam, lr=0.1))
    with pytest.raises(CheckpointError, match="but Adam has"):
        kv.load_optimizer_states(tmp_path / "states")
    (tmp_path / "states").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        kv.load_optimizer_states(tmp_path / "states")


def load_and_push(kv, path, gradients):
    kv.load_optimizer_states(path)
    kv.push(["w", "e"], gradients)


WRONG_STATES = {
    "a list": lambda states: states.update(w=[1]),
    "no options": lambda states: states["w"].pop("options"),
    "an option that is a mapping": lambda states: states["w"]["options"].update(lr={}),
    "an option of another kind": lambda states: states["w"]["options"].update(lr="x"),
    "no state": lambda states: states["w"].update(state=None),
    "another name": lambda states: states["w"]["state"].update(x=1),
    "another type": lambda states: states["w"]["state"].update(momentum_buffer=1),
    "another shape": lambda states: states["w"]["state"].update(momentum_buffer=torch.ones(3)),
    "rows of another shape": lambda states: states["e"]["state"].update(known=torch.ones(3)),
    "rows without a step": lambda states: states["e"]["state"].pop("step"),
}


@pytest.mark.parametrize("change", WRONG_STATES.values(), ids=WRONG_STATES)
def test_states_that_no_store_has_saved_are_refused_before_they_are_used(kv, change, tmp_path):
    kv.set_optimizer(partial(SGD, lr=0.1, momentum=0.9))
    both = [torch.tensor([1.0, 2.0]), sparse_rows([1, 2], [1.0, 2.0], 4)]
    kv.push(["w", "e"], both)
    path = tmp_path / "states"
    kv.save_optimizer_states(path, dump_optimizer=True)
    content = decode_value(path.read_bytes())
    change(*content.values())
    path.write_bytes(encode_value(content, "states"))
    with pytest.raises(CheckpointError):
        load_and_push(kv, path, both)


def test_devices_keep_what_two_bits_do_not_send():
    kv = kvstore.create("device")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", torch.zeros(3))
    kv.push("w", [torch.tensor([0.4, 0.9, -0.6]), torch.tensor([0.3, 0.0, 0.6])])
    assert pull(kv, "w", 3).tolist() == [0, 0.5, 0]
    kv.push("w", [torch.tensor([0.2, 0.2, 0.0]), torch.tensor([0.3, 0.0, 0.6])])
    assert pull(kv, "w", 3).tolist() == [1, 0.5, 0.5]


@pytest.mark.parametrize("code", [TwoBit(0.5), OneBit(0.1)])
def test_nothing_is_lost_by_a_code_but_time(code):
    sent, given = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    compression = GradientCompressor(code)
    for gradient in torch.randn(20, 50, dtype=torch.float64):
        sent += compression.compress("w", gradient)
        given += gradient
    assert torch.allclose(sent + compression.residuals["w"], given, atol=1e-12)


def test_one_bit_sends_as_mxnet_does():
    one = GradientCompressor(OneBit(0.5))
    gradients = torch.tensor([[0.6, 0.5, -0.2], [0.0, -1.2, 0.0]])
    assert [one.compress("w", gradient).tolist() for gradient in gradients] == [[1, -1, -1], [-1, -1, 1]]


def test_a_dense_tensor_keeps_the_rows_that_were_not_pulled(kv):
    table = torch.full((4, 2), 7.0)
    kv.row_sparse_pull("e", out=table, row_ids=torch.tensor([1, 3]))
    assert table[:, 0].tolist() == [7, 1, 7, 0]


def test_each_tensor_may_have_rows_of_its_own(kv):
    outs = [torch.zeros(4, 2).to_sparse(1) for _ in range(2)]
    kv.row_sparse_pull("e", out=outs, row_ids=[torch.tensor([1]), torch.tensor([[0, 0], [2, 2]])])
    assert [out.coalesce().indices().tolist() for out in outs] == [[[1]], [[0, 2]]]
    kv.row_sparse_pull("e", out=outs, row_ids=[torch.tensor([], dtype=torch.int64)])
    assert [out._nnz() for out in outs] == [0, 0]


def test_sparse_tensors_are_not_pulled_unless_asked_for(kv):
    out = torch.zeros(4, 2).to_sparse(1)
    kv.pull("e", out=out)
    assert out._nnz() == 0
    kv.pull("e", out=out, ignore_sparse=False)
    assert out.to_dense()[:, 0].tolist() == [0, 1, 0, 0]


def test_a_pushed_tensor_may_change_afterwards(kv):
    gradient = torch.ones(2)
    kv.push("w", gradient)
    gradient += 1
    assert pull(kv, "w", 2).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda kv: kv.push("x", torch.ones(2)), "push of key 'x', which does not exist .keys: 'w', 'e'."),
        (lambda kv: kv.pull("x", out=torch.ones(2)), "call init first"),
        (lambda kv: kv.init("w", torch.ones(2)), "exists already"),
        (lambda kv: kv.init(3, torch.ones(2)), "all int, or all str"),
        (lambda kv: kv.init("x", [torch.ones(2)] * 2), "has 2 values"),
        (lambda kv: kv.init(1.5, torch.ones(2)), "a key is an int or a str"),
        (lambda kv: kv.push(["w", "e"], torch.ones(2)), "push of 2 keys with a Tensor as values"),
        (lambda kv: kv.push("w", 3.0), "push of key 'w' with a float"),
        (lambda kv: kv.push("w", torch.ones(3)), r"torch.float32 \(3,\), but the key was created from"),
        (lambda kv: kv.push("w", torch.ones(2, dtype=torch.float64)), r"torch.float64 \(2,\)"),
        (lambda kv: kv.push("e", torch.ones(4, 2)), r"give tensor.to_sparse\(1\)"),
        (lambda kv: kv.push("e", torch.ones(4, 2).to_sparse()), "sparse in the first dim only"),
        (lambda kv: kv.pull("w"), "without out"),
        (lambda kv: kv.pull("w", out=torch.ones(2, 1)), "give a tensor of its shape"),
        (lambda kv: kv.row_sparse_pull("w", torch.ones(2), row_ids=torch.tensor([0])), "created from a dense tensor"),
        (lambda kv: kv.row_sparse_pull("e", torch.ones(4, 2)), "give the row indices"),
        (lambda kv: kv.row_sparse_pull("e", torch.ones(4, 2), row_ids=torch.tensor([4])), "the key has 4 rows"),
        (lambda kv: kv.row_sparse_pull("e", torch.ones(4, 2), row_ids=torch.ones(1)), "row indices are integers"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit"}), "nothing is sent in this store"),
        (lambda kv: kv.set_gradient_compression({"type": "3bit"}), "the types are 2bit and 1bit"),
        (lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": 0}), "above 0"),
        (lambda kv: kv.save_optimizer_states("x"), "call set_optimizer first"),
        (lambda kv: kv.is_capable("magic"), "only known capability is 'optimizer'"),
        (lambda kv: kvstore.create("nccl"), r"use create\('device'\)"),
        (lambda kv: kvstore.create("horovod"), r"counterpoint.compat.horovod.torch"),
        (lambda kv: kvstore.create("dist_sync_async"), "the types are local"),
        (lambda kv: kvstore.create("local", servers=2), "has no servers"),
        (lambda kv: kv._send_command_to_servers(0, ""), "servers take no commands"),
        (lambda kv: kvstore.KVStoreServer, "servers do not run the script"),
    ],
)
def test_a_call_that_does_not_fit_says_what_to_write(kv, use, text):
    with pytest.raises(PlanError, match=text):
        use(kv)


def test_a_barrier_of_one_process_is_passed_at_once(kv):
    kv.push("w", torch.ones(2))
    kv.barrier()
    assert pull(kv, "w", 2).tolist() == [1, 1]


def test_an_unknown_attribute_raises_attribute_error(kv):
    assert not hasattr(kv, "nothing_like_it")
    assert kv.is_capable("optimizer")
