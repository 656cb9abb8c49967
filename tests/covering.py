"""Products of parameters of which `make test` runs some cases, and `make test-all` every one."""

from itertools import product

import pytest


def each_value_once(*lists):
    """The product of some lists for ``parametrize``; what is not needed to have each value once is marked slow."""
    covering = {tuple(at % len(values) for values in lists) for at in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(values[index] for values, index in zip(lists, case, strict=True)),
            marks=() if case in covering else pytest.mark.slow,
        )
        for case in product(*(range(len(values)) for values in lists))
    ]
