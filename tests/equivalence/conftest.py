import pytest

from counterpoint.partitioning import traced
from tests.equivalence.shared_traces import export_or_share


@pytest.fixture(autouse=True)
def _shared_traces(monkeypatch):
    """A model that many tests train under many plans is traced once."""
    monkeypatch.setattr(traced, "export_graph", export_or_share)
