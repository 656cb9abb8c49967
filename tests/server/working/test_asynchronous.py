"""Workers that wait for nobody equal their references, from what they read to what they push."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from counterpoint.errors import PlanError
from counterpoint.server.job import Asp, Bsp, Ssp
from counterpoint.server.shard import replay
from counterpoint.server.working.layout import KEY as LAYOUT
from counterpoint.server.working.lookups import Table
from counterpoint.server.working.rhythm import Rhythm
from tests.references.downpour import downpour
from tests.server.working.crews import SGD, Crew, bags, distance, mlp, numbers, portions_of, words
from tests.server.working.test_same import START

ADAGRAD = partial(optim.Adagrad, lr=0.1)


@pytest.mark.parametrize(
    ("n_push", "n_fetch", "alpha"), [(1, 1, 0.0), (3, 1, 0.0), (1, 3, 0.0), (2, 3, 0.2), (3, 2, 0.2)]
)
@pytest.mark.parametrize("behind", [0, 1, 3])
def test_downpour_equals_its_sequential_reference(n_push, n_fetch, alpha, behind):
    data = numbers(24)
    portions = portions_of(data, Asp(), batch_size=2, minibatches=n_push)
    crew = Crew(portions, epochs=1)
    crew.join("a", mlp(), ADAGRAD, rhythm=Rhythm(n_push, n_fetch, alpha, fetch_ahead=behind))
    crew.take_turns()
    pieces = [one for number in range(portions.num_portions) for one in portions.read(0, number)]
    expected = downpour(
        mlp(),
        [one.fields for one in pieces],
        n_push=n_push,
        n_fetch=n_fetch,
        alpha=alpha,
        behind=behind,
        loss=F.cross_entropy,
        optimizer=ADAGRAD,
    )
    assert distance(crew.model(), expected) < 1e-12


@pytest.mark.parametrize("behind", [1, 2])
@pytest.mark.parametrize("indices", [None, torch.clone], ids=["found out", "told"])
@pytest.mark.parametrize("num_servers", [2, 1], ids=["rows", "sums"])
def test_rows_that_are_fetched_ahead_lack_the_pushes_before_as_weights_do(num_servers, indices, behind):
    portions = portions_of(words(24), Asp(), batch_size=2)
    crew = Crew(portions, epochs=1, task_portions=12, num_servers=num_servers)
    table, rhythm = Table(START, indices=indices), Rhythm(fetch_ahead=behind)
    served = crew.join("a", bags(), tables={"0.weight": table}, rhythm=rhythm)
    first = bags()
    first.get_parameter("0.weight").data = served.tables["0.weight"].whole()
    crew.take_turns()
    pieces = [one.fields for number in range(portions.num_portions) for one in portions.read(0, number)]
    options = {"n_push": 1, "n_fetch": 1, "alpha": 0.0, "loss": F.cross_entropy, "optimizer": SGD}
    expected = downpour(first, pieces, behind=behind, **options)
    assert distance(crew.model(), expected) < 1e-12


@pytest.mark.parametrize("consistency", [Asp(), Ssp(0), Ssp(2), Bsp(3)], ids=str)
def test_the_journal_says_what_became_of_the_weights(consistency):
    crew = Crew(portions_of(words(30), consistency, batch_size=6), task_portions=1 if consistency == Bsp(3) else 2)
    for name in "abc":
        crew.join(name, bags(), ADAGRAD, tables={"0.weight": START})
    crew.take_turns()
    for index in range(2):
        entries = [entry for _, entry in sorted(crew.job.journals[index].items())]
        again = replay(crew.job.job, index, entries)
        assert again.digest() == crew.shard(index).digest()


def test_every_portion_counts_once_whoever_comes_and_goes():
    crew = Crew(portions_of(numbers(40), Asp(), batch_size=4), task_portions=2)
    crew.join("a", mlp())
    crew.take_turns(3)
    crew.join("b", mlp())
    crew.take_turns(1)
    crew.gone.add("a")
    crew.take_turns()
    shards = [crew.shard(index) for index in range(2)]
    counted = [key.tally.portions.bounds for shard in shards for name, key in shard.keys.items() if name != LAYOUT]
    assert counted == [[0, 20], [0, 20]]


def test_a_worker_that_is_slow_holds_the_others_no_further_back_than_agreed():
    crew = Crew(portions_of(numbers(40), Ssp(1), batch_size=4))
    crew.join("a", mlp())
    crew.join("b", mlp())
    crew.take_turns()
    assert sorted(crew.trained) == list(range(20))


@pytest.mark.parametrize("rhythm", [{"fetch_every": 2}, {"fetch_ahead": 1}], ids=str)
def test_weights_of_before_are_for_asynchronous_jobs_only(rhythm):
    crew = Crew(portions_of(numbers(), Ssp(1)))
    with pytest.raises(PlanError, match="computes from weights of before"):
        crew.join("a", mlp(), rhythm=Rhythm(**rhythm))


def test_one_push_for_several_minibatches_is_the_sum_of_their_gradients():
    data = numbers(8)
    crew = Crew(portions_of(data, Asp(), batch_size=4, minibatches=2), epochs=1)
    crew.join("a", mlp(), rhythm=Rhythm(push_every=2))
    crew.take_turns()
    expected = mlp()
    updates = SGD(expected.parameters())
    for one in crew.portions.read(0, 0):
        F.cross_entropy(expected(one.fields[0]), one.fields[1]).backward()
    updates.step()
    assert distance(crew.model(), expected) < 1e-12
