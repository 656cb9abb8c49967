import pytest

from tests.fabric.players import on_local, on_torch


@pytest.fixture(params=["local", pytest.param("torch", marks=pytest.mark.process)])
def play(request):
    """Return ``play(scene, num_ranks)``: what each rank got, on this transport."""
    return {"local": on_local, "torch": on_torch}[request.param]
