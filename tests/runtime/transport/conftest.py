"""What every test of the contract of `transport.py` is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightgrad.runtime.transport.transport import ServerTransport

from .harness import RecordingApplication
from .implementations import Implementation, InMemory, OverGrpc, OverProcess


@pytest.fixture(params=[OverGrpc, OverProcess, InMemory], ids=["grpc", "grpc-process", "in-memory"])
def transport(request: pytest.FixtureRequest) -> Implementation:
    made: Implementation = request.param()
    return made


@pytest.fixture
def application() -> Iterator[RecordingApplication]:
    made = RecordingApplication()
    yield made
    assert not made.overlapping, "two callbacks about one peer ran at the same time"


@pytest.fixture
def server(transport: Implementation, application: RecordingApplication) -> Iterator[ServerTransport]:
    with transport.server(application) as made:
        yield made
