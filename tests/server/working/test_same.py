"""What workers that come and go learn under bsp is what one loop learns."""

from functools import partial

import pytest
import torch
from torch import nn, optim

from counterpoint.server.beginnings import begin
from counterpoint.server.choices import Uniform
from counterpoint.server.job import Asp, Bsp, Ssp
from counterpoint.server.working.loop import Habits
from tests.server.working.crews import NUM_ROWS, Crew, bags, distance, mlp, numbers, portions_of, solo, words

START = Uniform(-0.5, 0.5, seed=7)
OPTIMIZERS = [
    partial(optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01),
    partial(optim.SGD, lr=0.3, momentum=0.9, nesterov=True),
    partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    partial(optim.Adam, lr=0.05, weight_decay=0.1),
]


def with_rows(model: nn.Module, padding: int | None = None) -> nn.Module:
    """The model with the rows that the servers begin with."""
    rows = begin(START, "0.weight", torch.arange(NUM_ROWS), 4, torch.float64)
    if padding is not None:
        rows[padding] = 0
    with torch.no_grad():
        model.get_parameter("0.weight").copy_(rows)
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_workers_that_come_and_go_equal_one_loop(optimizer):
    data = numbers()
    crew = Crew(portions_of(data, Bsp(4)), epochs=3)
    crew.join("a", mlp(), optimizer)
    crew.take_turns(3)
    crew.join("b", mlp(), optimizer)
    crew.join("c", mlp(), optimizer)
    crew.take_turns(3)
    crew.gone.add("a")
    crew.take_turns()
    assert distance(crew.model(), solo(mlp(), data, crew.portions, optimizer, epochs=3)) < 1e-12


def goes(_moment):
    raise KeyboardInterrupt


@pytest.mark.parametrize(("build", "data"), [(mlp, numbers()), (bags, words())], ids=["dense", "table"])
def test_a_portion_of_which_one_key_has_been_pushed_is_repeated_from_the_weights_of_its_step(build, data):
    """The key that had the last portion of a step from a worker that died went on without the others."""
    crew = Crew(portions_of(data, Bsp(4)))
    tables = {"0.weight": START} if build is bags else {}
    crew.join("before", build(), tables=tables)
    crew.take_turns(6)
    crew.gone.add("before")
    crew.take_turns()
    dying = crew.join("dying", build(), tables=tables)
    (dying.tables["0.weight"] if tables else dying.weights[0]).push = goes if build is mlp else partial(goes, None)
    with pytest.raises(KeyboardInterrupt):
        crew.take_turns()
    crew.gone.add("dying")
    crew.join("after", build(), tables=tables)
    crew.take_turns()
    expected = solo(with_rows(build()) if tables else build(), data, crew.portions)
    assert distance(crew.model(), expected) < 1e-12


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("padding", [None, 4])
def test_rows_on_servers_equal_a_whole_table(num_workers, padding):
    data = words()
    crew = Crew(portions_of(data, Bsp(4)), task_portions=2)
    for index in range(num_workers):
        crew.join(f"w{index}", bags(padding), tables={"0.weight": START})
    crew.take_turns()
    expected = solo(with_rows(bags(padding), padding), data, crew.portions)
    assert distance(crew.model(), expected) < 1e-12


def test_a_batch_that_is_cut_unevenly_is_the_mean_over_its_samples():
    data = numbers(13)
    crew = Crew(portions_of(data, Bsp(5), batch_size=7, minibatches=2))
    crew.join("a", mlp())
    crew.take_turns()
    assert distance(crew.model(), solo(mlp(), data, crew.portions)) < 1e-12


def test_the_same_bits_come_out_for_any_number_of_workers():
    found = []
    for num_workers in (1, 3):
        crew = Crew(portions_of(numbers(), Bsp(4)))
        for index in range(num_workers):
            crew.join(f"w{index}", mlp(dropout=0.5))
        crew.take_turns()
        found.append(crew.model())
    assert distance(*found) == 0


def test_what_is_fetched_ahead_is_what_would_have_been_fetched():
    for consistency in (Bsp(2), Ssp(1), Asp()):
        found = []
        for prefetch in (False, True):
            crew = Crew(portions_of(words(40), consistency, batch_size=4), task_portions=2)
            crew.join("a", bags(), tables={"0.weight": START}, habits=Habits(prefetch=prefetch))
            crew.take_turns()
            found.append(crew.model())
        assert distance(*found) == 0


def test_keys_of_several_modules_equal_one_loop():
    data = numbers()
    crew = Crew(portions_of(data, Bsp(4)))
    crew.join("a", mlp(), key_bytes=1 << 16)
    crew.join("b", mlp(), key_bytes=1 << 16)
    crew.take_turns()
    assert distance(crew.model(), solo(mlp(), data, crew.portions)) < 1e-12
