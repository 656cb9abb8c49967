"""Products of parameters of which `make test` runs some cases, and `make test-all` every one."""

from itertools import product

import pytest


def each_value_once(*lists):
    """The product of some lists for ``parametrize``; what is not needed to have each value once is marked slow."""
    size = max(map(len, lists))
    covering = {tuple(values[at % len(values)] for values in lists) for at in range(size)}
    return [case if case in covering else pytest.param(*case, marks=pytest.mark.slow) for case in product(*lists)]
