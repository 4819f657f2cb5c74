"""What attention reads besides numbers: which rows belong to which request, and where its keys lie.

    AttentionBatch(query_start=[0, 3, 4], kv_len=[3, 40], block_table=[[7, 0, 0], [2, 9, 4]],
                   slot=[112, 113, 114, 71])

is a mixed batch of a whole prefill (3 new tokens in page 7) and one decode step (token 39 of a
request in pages 2, 9, 4). Rows of a request are the last ones of its ``kv_len`` positions. Slots
are ``page * 16 + offset``; a table's unused entries may hold anything.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ContractError

PAGE = 16


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Pages of keys and values on one device, in the layout of its kernels.

    CPU: ``k [P, HK, D', 16]``, ``v [P, HK, 16, D']``, D' is D padded to 16. GPU: both
    ``[P, 16, HK, D]``.
    """

    k: Tensor
    v: Tensor
    kv_heads: int
    head_dim: int

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Index tensors of one step, all on one device.

    query_start: int32 [B + 1], ascending from 0. kv_len: int32 [B].
    block_table: int32 [B, max_pages]. slot: int64 [T], one distinct slot per new token.
    derived: what kernels make of these once per step, for all layers.
    """

    query_start: Tensor
    kv_len: Tensor
    block_table: Tensor
    slot: Tensor
    derived: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def __post_init__(self) -> None:
        requests = self.kv_len.numel()
        shaped = (
            self.query_start.shape == (requests + 1,)
            and self.kv_len.dim() == 1
            and self.block_table.dim() == 2
            and self.block_table.shape[0] == requests
            and self.slot.dim() == 1
        )
        typed = self.slot.dtype == torch.int64 and all(
            each.dtype == torch.int32 for each in (self.query_start, self.kv_len, self.block_table)
        )
        whole = all(
            each.is_contiguous()
            for each in (self.query_start, self.kv_len, self.block_table, self.slot)
        )
        if not (shaped and typed and whole):
            raise ContractError(
                "an attention batch holds contiguous int32 query_start [B + 1], kv_len [B], "
                "block_table [B, max_pages] and int64 slot [T]; got "
                f"{tuple(self.query_start.shape)}, {tuple(self.kv_len.shape)}, "
                f"{tuple(self.block_table.shape)}, {tuple(self.slot.shape)}; build them so"
            )

    @property
    def num_pages(self) -> int:
        """Pages that the requests' keys fill."""
        return int(((self.kv_len + PAGE - 1) // PAGE).sum())


def packed_batch(query_start: Tensor) -> AttentionBatch:
    """Whole requests back to back, each in pages of its own; integer ``query_start [B + 1]``."""
    start = query_start.to(torch.int64)
    length = start.diff()
    if start.dim() != 1 or not start.numel() or int(start[0]) or bool((length < 0).any()):
        raise ContractError(
            f"query_start {query_start.tolist()} is not an ascending vector from 0; pass the row "
            "at which each request begins, and the number of rows at the end"
        )
    pages = (length + PAGE - 1) // PAGE
    first_page = pages.cumsum(0) - pages
    row = torch.arange(int(start[-1]), device=start.device)
    offset = torch.repeat_interleave(first_page * PAGE - start[:-1], length)
    most = int(pages.max()) if pages.numel() else 0
    table = first_page[:, None] + torch.arange(most, device=start.device)
    return AttentionBatch(
        query_start=start.to(torch.int32).contiguous(),
        kv_len=length.to(torch.int32),
        block_table=table.to(torch.int32).contiguous(),
        slot=row + offset,
    )
