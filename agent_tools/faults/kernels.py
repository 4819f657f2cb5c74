"""The faulty kernels by fault, and one planted without a model: what a generated repro needs.

    with planted_kernel("B02", "linear.chain.float32.cpu.v1"):
        linear(x, weight)                           # now the faulty product

Nothing here loads an engine or transformers, so that a repro of one operator starts fast.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping

from ...kernels import dispatch
from ...kernels.errors import UsageError
from . import attention, operators
from .mechanism import Wrap

KERNELS: Mapping[str, Callable[[], Wrap]] = {
    "B01": lambda: operators.lanes_by_row_count,
    "B02": lambda: operators.split_for_few_rows,
    "B03": lambda: operators.tf32_for_many_rows,
    "B04": lambda: operators.one_scale_for_the_batch,
    "B05": lambda: operators.stock_product,
    "B08": lambda: attention.splits_from_the_batch,
    "B10": operators.Autotuned,
    "P01": lambda: attention.larger_tile_in_decode,
    "C02": lambda: attention.other_path_after_a_hit,
    "W01t": attention.CapturedTable,
    "R01": lambda: operators.shards_by_message_size,
    "L04": lambda: operators.bf16_logits,
    "M06": lambda: attention.heads_in_turn,
}
"""What makes the kernel of a fault; each planting gets its own."""


@contextlib.contextmanager
def planted_kernel(name: str, contract: str) -> Generator[None]:
    """The faulty kernel of a fault serves ``contract``, without a model or an engine."""
    if name not in KERNELS:
        raise UsageError(f"fault {name} is in no kernel; plant it on an engine instead")
    right, faulty = dispatch.choose(contract).run, KERNELS[name]()
    with dispatch.substituted(contract, lambda *given: faulty(right, *given)):
        yield
