"""One clean process for a whole folder of verifications: workers are forked from it, candidates
never run in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from zeromismatch.agent_tools.verify.records import Limits
from zeromismatch.agent_tools.verify.watch import Nursery

CANDIDATES = Path(__file__).parent / "candidates"


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    limits = Limits(call_seconds=4.0, wall_seconds=60.0, cpu_seconds=20)
    with Nursery(limits) as running:
        yield running
