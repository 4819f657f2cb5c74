"""The documents of commands that answer with plain data, as types.

Only the schemas of the tools need them (``server/schemas.py``); importing this imports torch.
"""

from typing import NotRequired

from typing_extensions import TypedDict

from ...kernels.certificates import Certificate
from ...model_recipes.inspection import SiteRow
from ..reduction.whole import WholeRepro
from ..repro import Repro

AnyRepro = Repro | WholeRepro


class Fetched(TypedDict):
    """``zm fetch``."""

    model: str
    folder: str


class Inspection(TypedDict):
    """``zm inspect``."""

    model: str
    dtype: str
    device: str
    aligned: bool
    sites: list[SiteRow]
    sources: NotRequired[dict[str, str]]


class ContractRow(TypedDict):
    """A contract and the standing of each implementation on this machine."""

    id: str
    op: str
    dtype: str
    device: str
    formula: str
    order: str
    rounding: str
    functions: tuple[str, ...]
    reference: str | None
    implementations: dict[str, str]


class Contracts(TypedDict):
    """``zm kernels list``."""

    contracts: list[ContractRow]


class Certified(TypedDict):
    """``zm kernels certify``."""

    certificates: list[Certificate]
    admitted: int
    refused: int
    left_out: dict[str, str]


class SpeedRow(TypedDict):
    """One operator at one shape; ratio above 1 is faster than stock torch."""

    op: str
    dtype: str
    shape: str
    ours_us: float
    stock_us: float
    ratio: float
    spread: tuple[float, float]
    pairs: int
    floor: float | None
    stock: str
    implementation: str
    reached: bool | None


class Benched(TypedDict):
    """``zm kernels bench``."""

    rows: list[SpeedRow]
    below_floor: int


class Drawn(TypedDict):
    """``zm report``."""

    page: str
    verdict: str
    title: str


class PlaybookTitle(TypedDict):
    """One playbook in the list."""

    name: str
    title: str


class Playbooks(TypedDict):
    """``zm playbook``: the list, or one page."""

    playbooks: NotRequired[list[PlaybookTitle]]
    name: NotRequired[str]
    title: NotRequired[str]
    text: NotRequired[str]
