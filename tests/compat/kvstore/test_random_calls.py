"""Whatever is called in whatever order, stores with servers come to what twenty lines come to."""

from functools import partial

import torch
from hypothesis import given, settings, strategies as st
from torch.optim import SGD

from tests.compat.kvstore.store_helpers import pull, stores

KEYS = ("w", "v")
NUMBERS = st.lists(st.integers(-4, 4), min_size=3, max_size=3)
PUSH = st.tuples(st.just("push"), st.sampled_from(KEYS), NUMBERS)
PULL = st.tuples(st.just("pull"), st.sampled_from(KEYS), st.none())
SET = st.tuples(st.just("set_optimizer"), st.just(""), st.sampled_from([1.0, 0.5, 0.25]))


class Reference:
    """What a store is: of every key a value, and the sum of what is pushed takes its place or makes a step."""

    def __init__(self):
        self.values = {key: torch.zeros(2) for key in KEYS}
        self.lr = None

    def call(self, what, key, given, num_workers):
        if what == "set_optimizer":
            self.lr = given
        elif what == "push":
            total = torch.full((2,), float(sum(given[:num_workers])))
            self.values[key] = total if self.lr is None else self.values[key] - self.lr * total


def everybody(kvs, what, key, given):
    """All workers make a call, the last one first."""
    for kv in reversed(kvs):
        if what == "set_optimizer":
            kv.set_optimizer(partial(SGD, lr=given))
        elif what == "push":
            kv.push(key, torch.full((2,), float(given[kv.rank])))
        else:
            pull(kv, key, 2)


@settings(max_examples=40)
@given(st.sampled_from(["dist_sync", "dist_async"]), st.integers(1, 3), st.integers(1, 2), st.lists(PUSH | PULL | SET))
def test_any_calls_come_to_what_twenty_lines_come_to(kind, num_workers, num_servers, calls):
    """Steps of halves and quarters are exact, so the order in which servers count them says nothing."""
    kvs, reference = stores(kind, num_workers, num_servers), Reference()
    for kv in kvs:
        kv.init(list(KEYS), [torch.zeros(2)] * 2)
    for what, key, given_to in calls:
        if what == "push" and reference.lr is None and kind == "dist_async":
            continue
        everybody(kvs, what, key, given_to)
        reference.call(what, key, given_to, num_workers)
        for kv in kvs if what == "pull" else ():
            assert torch.equal(pull(kv, key, 2), reference.values[key])
