"""Every example in a docstring is run: one that no longer holds is worse than none."""

import doctest
import importlib

import pytest

from tests.house.source import FILES, SOURCE, name_of

WITH_EXAMPLES = [path for path in FILES if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_docstring_hold(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0
