"""Products of parameters and laws of which `make test` runs some cases; the others are marked ``slow`` or ``long``."""

import inspect
from itertools import product

import pytest
from hypothesis import given, settings


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


def given_few_or_many(few, many, *strategies, **named_strategies):
    """Hypothesis' ``given`` with ``few`` examples in `make test`, and once more with ``many`` that is marked long."""

    def decorate(law):
        drawn = given(*strategies, **named_strategies)
        laws = {count: settings(max_examples=count)(drawn(law)) for count in (few, many)}

        def run(examples, **values):
            laws[examples](**values)

        examples = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)
        others = inspect.signature(laws[few]).parameters.values()
        signature = inspect.Signature([*(one.replace(kind=examples.kind) for one in others), examples])
        vars(run)["__signature__"] = signature
        run.__name__, run.__qualname__, run.__module__, run.__doc__ = (
            law.__name__, law.__qualname__, law.__module__, law.__doc__,
        )  # fmt: skip
        counts = [few, pytest.param(many, marks=pytest.mark.long)]
        return pytest.mark.parametrize("examples", counts, ids=["few", "many"])(run)

    return decorate


def matches(name, entry):
    """Tell whether an entry of ``quick`` is the id of a case, or its beginning and three dots."""
    return name.startswith(entry[:-3]) if entry.endswith("...") else name == entry


def unmark_quick_cases(cases):
    """Take the mark ``long`` from those cases of a test that its argument ``quick`` lists; each of them must be there."""
    mark = cases[0].get_closest_marker("long") if cases else None
    if mark is None or "quick" not in mark.kwargs:
        return
    names = [case.callspec.id for case in cases if hasattr(case, "callspec")]
    if unknown := [entry for entry in mark.kwargs["quick"] if not any(matches(name, entry) for name in names)]:
        message = f"{cases[0].originalname} has no case {', '.join(unknown)}; long(quick=...) takes ids of its cases"
        raise pytest.Collector.CollectError(message)
    for case in cases:
        if any(matches(case.callspec.id, entry) for entry in mark.kwargs["quick"]):
            case.own_markers.remove(mark)
