"""The first worker decides which parameters form a key; later workers use these keys, or get an error that says why not."""

import tracemalloc
import zlib

import pytest
import torch
from torch import nn, optim

from counterpoint.elastic.parameter_keys import (
    BYTES_PER_ROW,
    LENGTH_BYTES,
    MAX_LAYOUT_CHARACTERS,
    agree_on_layout,
    parse_layout,
    rows_to_text,
    text_to_rows,
)
from counterpoint.errors import PlanError, ProtocolError
from counterpoint.ps.consistency import Asp, Bsp
from counterpoint.ps.in_process import LocalJob
from counterpoint.ps.job_config import JobConfig
from tests.elastic.worker_fixtures import (
    SGD,
    InterleavedWorkers,
    build_seeded,
    make_numeric_data,
    make_slices,
    max_relative_difference,
    mlp,
    train_single_process,
)

APART, TOGETHER = 0, 1 << 16


def two_groups(parameters):
    first, *others = parameters
    return optim.SGD([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.3)


@pytest.mark.parametrize(("first", "second"), [(APART, TOGETHER), (TOGETHER, APART)])
def test_workers_that_ask_for_other_keys_train_those_of_the_first(first, second):
    data = make_numeric_data()
    workers = InterleavedWorkers(make_slices(data, Bsp(4)))
    workers.join("a", mlp(), key_bytes=first)
    keys = [one.key for one in workers.remote_modules["a"].weights]
    workers.join("b", mlp(), key_bytes=second)
    assert [one.key for one in workers.remote_modules["b"].weights] == keys
    workers.run_rounds()
    assert max_relative_difference(workers.model(), train_single_process(mlp(), data, workers.slices)) < 1e-12


def test_keys_of_several_modules_are_no_matter_for_a_code():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), key_bytes=TOGETHER)
    message = r"several modules in one key, '0\.weight\+bias to 3\.weight\+bias', but compress='int8' compresses each"
    with pytest.raises(PlanError, match=message):
        workers.join("b", mlp(), compress="int8")


def test_a_code_continues_with_keys_of_one_module_each():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), compress="int8")
    assert len(workers.join("b", mlp(), key_bytes=TOGETHER).weights) == 2


def test_another_model_is_reported_what_differs():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), key_bytes=TOGETHER)
    deeper = build_seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)))
    message = (
        r"another model: only there none, only here 2\.bias, 2\.weight; use the model that the job was started with"
    )
    with pytest.raises(PlanError, match=message):
        workers.join("b", deeper, key_bytes=TOGETHER)


def test_another_optimizer_of_a_part_is_reported_where_it_differs():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), key_bytes=TOGETHER)
    with pytest.raises(PlanError, match=r"has 0\.weight and 0\.bias in one key, but here their rules or dtypes differ"):
        workers.join("b", mlp(), two_groups, key_bytes=APART)


def test_another_rate_is_reported_with_both():
    workers = InterleavedWorkers(make_slices(make_numeric_data(), Asp()))
    workers.join("a", mlp(), SGD)
    with pytest.raises(PlanError, match=r"Sgd\(lr=0\.3.*, but b defines it as .*Sgd\(lr=0\.1"):
        workers.join("b", mlp(), lambda parameters: optim.SGD(parameters, lr=0.1))


@pytest.mark.parametrize("num_servers", [1, 3])
def test_names_of_a_large_model_are_kept_whole_and_are_the_first_worker_s(num_servers):
    draw = torch.Generator().manual_seed(0)
    names = torch.randint(0, 1 << 40, (500,), generator=draw).tolist()
    layout = {f"{number:x}": [f"{number:x}.weight", "bias"] for number in names}
    job = LocalJob(JobConfig("names", Asp(), num_servers))
    with job.join("a") as first, job.join("b") as second:
        assert agree_on_layout(first, layout) == layout
        assert agree_on_layout(second, {"other": ["weight"]}) == layout


@pytest.mark.parametrize("length", [0, 1, BYTES_PER_ROW, 100 * BYTES_PER_ROW])
def test_a_text_is_what_its_rows_say(length):
    draw = torch.Generator().manual_seed(length)
    text = "".join(map(chr, torch.randint(32, 127, (length,), generator=draw).tolist()))
    assert rows_to_text(text_to_rows(text)) == text


def rows_of(packed):
    """Return rows as a member writes them that does not use text_to_rows."""
    padded = len(packed).to_bytes(LENGTH_BYTES, "big") + packed
    padded = padded.ljust(-(-len(padded) // BYTES_PER_ROW) * BYTES_PER_ROW, b"\0")
    return torch.tensor(list(padded), dtype=torch.float16).view(-1, BYTES_PER_ROW)


def test_few_rows_that_say_much_take_little_memory():
    bomb = rows_of(zlib.compress(bytes(2 * MAX_LAYOUT_CHARACTERS), 1))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="ends early, or has more than 16777216 characters"):
        rows_to_text(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LAYOUT_CHARACTERS


@pytest.mark.parametrize(
    "rows",
    [rows_of(b"no stream"), rows_of(zlib.compress(b"{}")[:-3]), rows_of(zlib.compress(b"\xff")), rows_of(b"")],
)
def test_rows_that_are_no_text_are_refused(rows):
    with pytest.raises(ProtocolError, match=r"form that cannot be read: .*; use one version of counterpoint"):
        rows_to_text(rows)


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', '{"a": []}', '{"a": [1]}', '{"a": ["b"], "a": ["c"]}', "{"])
def test_a_text_that_is_no_layout_is_refused(text):
    with pytest.raises(ProtocolError, match="form that cannot be read: "):
        parse_layout(text)
