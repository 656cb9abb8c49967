"""All ranks in one process: deterministic order, errors that name the rank, nothing left behind."""

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode

from counterpoint.errors import PeerError, PlanError, ProgramError
from counterpoint.fabric import LocalWorld

FOUR = (0, 1, 2, 3)


@pytest.fixture
def world():
    with LocalWorld(4) as world:
        yield world


def test_ranks_run_round_robin(world):
    seen = []

    def work(fabric):
        for step in range(2):
            seen.append((step, fabric.rank))
            fabric.barrier(FOUR)

    for _ in range(20):
        world.run(work)
        assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 0), (1, 1), (1, 2)]
        seen.clear()


def test_sums_are_added_in_the_order_of_the_group(world):
    parts = [torch.tensor([10.0 ** (8 - 8 * (rank % 2)) * (-1) ** (rank // 2)]) for rank in FOUR]
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]

    def work(fabric):
        own = parts[fabric.rank].clone()
        fabric.all_reduce("a", own, FOUR).wait()
        return own

    assert all(torch.equal(result, expected) for result in world.run(work))


def test_each_rank_draws_its_own_random_numbers(world):
    def draw(fabric):
        torch.manual_seed(fabric.rank)
        first = torch.rand(2)
        fabric.barrier(FOUR)
        return torch.cat([first, torch.rand(2)]), torch.rand(1)

    before = torch.get_rng_state()
    for rank, (drawn, last) in enumerate(world.run(draw)):
        expected = torch.Generator().manual_seed(rank)
        assert torch.equal(drawn, torch.cat([torch.rand(2, generator=expected), torch.rand(2, generator=expected)]))
        assert torch.equal(last, torch.rand(1, generator=expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_continue_from_run_to_run(world):
    torch.manual_seed(5)
    drawn = [world.run(lambda fabric: torch.rand(1).item()) for _ in range(2)]
    torch.manual_seed(5)
    assert drawn == [[torch.rand(1).item()] * 4 for _ in range(2)]


def test_gradient_mode_is_the_callers_and_then_each_ranks_own(world):
    def look(fabric):
        began = torch.is_grad_enabled()
        torch.set_grad_enabled(fabric.rank % 2 == 0)
        fabric.barrier(FOUR)
        return began, torch.is_grad_enabled()

    assert world.run(look) == [(True, rank % 2 == 0) for rank in FOUR]
    with torch.no_grad():
        assert [began for began, _ in world.run(look)] == [False] * 4


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * (2 if func is torch.ones else 1)


def test_function_modes_are_the_callers(world):
    with Doubled():
        assert world.run(lambda fabric: torch.ones(1).tolist()) == [[2.0]] * len(world.fabrics)
    assert world.run(lambda fabric: torch.ones(1).tolist()) == [[1.0]] * len(world.fabrics)


def test_a_deadlock_says_who_waits_for_what(world):
    def work(fabric):
        if fabric.rank == 0:
            fabric.recv(1, "x1.0")
        elif fabric.rank == 1:
            fabric.all_reduce("grad0", torch.ones(1), (0, 1, 2)).wait()
        elif fabric.rank == 2:
            fabric.recv_any([0, 1])

    with pytest.raises(PeerError) as failure:
        world.run(work)
    assert str(failure.value).startswith(
        "deadlock: rank 0 waits for x1.0 from rank 1; "
        "rank 1 waits for all_reduce sum of grad0 among ranks 0, 1, 2 with ranks 0, 2; "
        "rank 2 waits for any message from ranks 0, 1; rank 3 has ended; "
    )


def test_the_error_of_one_rank_is_raised_and_ends_the_others(world):
    ended = {}

    def work(fabric):
        try:
            if fabric.rank == 2:
                raise KeyError("lost")
            fabric.barrier(FOUR)
        except PeerError as error:
            ended[fabric.rank] = str(error)
            raise

    with pytest.raises(KeyError) as failure:
        world.run(work)
    assert failure.value.__notes__ == ["raised by rank 2 of 4; the others were stopped"]
    assert ended == dict.fromkeys((0, 1), "stopped because of rank 2: KeyError: 'lost'")
    assert world.run(lambda fabric: fabric.gather_values("a", fabric.rank, FOUR)) == [[0, 1, 2, 3]] * 4


def test_a_rank_that_stops_says_why(world):
    def work(fabric):
        if fabric.rank == 3:
            fabric.abort("the loss is nan")
            return None
        return fabric.recv(3, "x")

    with pytest.raises(PeerError, match=r"stopped because of rank 3: the loss is nan"):
        world.run(work)


def test_a_collective_in_flight_continues_in_the_next_run(world):
    started = {}

    def begin(fabric):
        fabric.send((fabric.rank + 1) % 4, "x", [torch.tensor(fabric.rank)])
        started[fabric.rank] = fabric.all_reduce("a", torch.ones(1), FOUR)

    def end(fabric):
        started[fabric.rank].wait()
        return fabric.recv((fabric.rank - 1) % 4, "x")[0].item()

    world.run(begin)
    assert world.run(end) == [3, 0, 1, 2]


def test_backward_may_wait_for_other_ranks(world):
    def work(fabric):
        leaf = torch.full((2,), float(fabric.rank), requires_grad=True)
        leaf.register_post_accumulate_grad_hook(lambda p: fabric.all_reduce("grad", p.grad, FOUR).wait())
        (leaf * leaf).sum().backward()
        return leaf.grad

    assert all(torch.equal(grad, torch.full((2,), 12.0)) for grad in world.run(work))


def test_a_world_of_one_runs_where_it_is_called():
    with LocalWorld(1) as world:
        assert world.run(lambda fabric: threading.current_thread()) == [threading.current_thread()]


def test_a_rank_may_not_start_its_own_world(world):
    with pytest.raises(ProgramError, match="the ranks are running already"):
        world.run(lambda fabric: world.run(lambda inner: None))


def test_a_closed_world_leaves_no_thread():
    before = threading.active_count()
    world = LocalWorld(8)
    world.run(lambda fabric: fabric.barrier(tuple(range(8))))
    assert threading.active_count() == before + 8
    world.close()
    world.close()
    assert threading.active_count() == before


def test_a_closed_world_refuses_to_run_at_once():
    """It waited for ever for threads that had ended."""
    world = LocalWorld(2)
    world.run(lambda fabric: fabric.barrier((0, 1)))
    world.close()
    with pytest.raises(PlanError, match=r"^the 2 ranks have ended because close\(\) was called; .* create them again"):
        world.run(lambda fabric: fabric.barrier((0, 1)))
