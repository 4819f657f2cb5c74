"""Attention by contract as a vLLM backend: its cache, its work lists, its kernel.

vLLM hands over one buffer per layer and numbers its blocks; how a block's bytes are used is the
backend's. A block holds a page of keys, then a page of values, each as the contract's kernel wants
it. Seen as an array of half blocks, keys of block b are page 2b of one view and values are page 2b
of a view that starts one half block later: so any layout of whole blocks serves, and the block
table is doubled once per step for all layers.

The metadata's tensors stay where they are (``_Buffers``), because captured graphs remember
addresses. Lengths are read on the device; which rows are split over keys is part of no number.

Nothing here is imported without vLLM. Legend: T rows, H query heads, HK kv heads, D head size.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from ....kernels.attention import PAGE, KVCache, paged_attention, write_kv
from ....kernels.attention.batch import AttentionBatch
from ....kernels.attention.gpu_table import shape_of
from ....kernels.errors import CapabilityError
from . import compat
from .graph_tap import tapped


class AlignedAttention(AttentionBackend):
    """The backend that :func:`put_on` gives to every attention layer of a model with a plan."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "float32"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size if default_block_size % PAGE == 0 else PAGE

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        return compat.whole_block_layouts()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_impl_cls() -> type["AlignedImpl"]:
        return AlignedImpl

    @staticmethod
    def get_builder_cls() -> type["AlignedBuilder"]:
        return AlignedBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetadata:
    """One step, for all layers."""

    rows: int
    batch: AttentionBatch


class _Buffers:
    """Index tensors at fixed addresses, as large as a step can be."""

    def __init__(self, requests: int, blocks: int, rows: int, device: torch.device) -> None:
        integers = {"dtype": torch.int32, "device": device}
        self.table = torch.zeros(requests, blocks, **integers)
        self.walk_start, self.split_start = (
            torch.zeros(requests + 1, **integers) for _ in range(2)
        )
        self.slot = torch.zeros(rows, dtype=torch.int64, device=device)


class AlignedBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Turns vLLM's block tables and slots into those of half blocks, and makes the work lists."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        heads = model.get_num_attention_heads(vllm_config.parallel_config)
        self.tile = shape_of("walk", kv_cache_spec.head_size, kv_cache_spec.dtype).bm
        self.group = heads // kv_cache_spec.num_kv_heads
        self.longest = int(model.max_model_len)
        self._buffers: _Buffers | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        common = common_attn_metadata
        requests, rows = common.num_reqs, common.num_actual_tokens
        query_start = common.query_start_loc[: requests + 1]
        kv_len = common.seq_lens[:requests]
        table, slot = common.block_table_tensor[:requests], common.slot_mapping[:rows]
        if not query_start.is_cuda:
            return StepMetadata(rows=rows, batch=_cpu_batch(query_start, kv_len, table, slot))
        return self._gpu_step(common, query_start, kv_len, table, slot)

    def _gpu_step(
        self, common: Any, query_start: Tensor, kv_len: Tensor, table: Tensor, slot: Tensor
    ) -> StepMetadata:
        from ....kernels.attention.gpu_step import Work, schedule

        requests, rows = kv_len.numel(), slot.numel()
        held = self._hold(requests, table.shape[1], rows)
        doubled = held.table[:requests]
        torch.mul(table, 2, out=doubled)
        slots = torch.add(slot, torch.div(slot, PAGE, rounding_mode="floor"), alpha=PAGE,
                          out=held.slot[:rows])  # fmt: skip
        work = schedule(
            query_start,
            kv_len,
            tokens=rows,
            group=self.group,
            tile=self.tile,
            max_kv=min(self.longest, table.shape[1] * PAGE),
            max_query=int(common.max_query_len),
        )
        walk, split = held.walk_start[: requests + 1], held.split_start[: requests + 1]
        walk.copy_(work.walk_start)
        split.copy_(work.split_start)
        batch = AttentionBatch(
            query_start=query_start, kv_len=kv_len, block_table=doubled, slot=slots
        )
        batch.derived[self.tile, self.group, 0] = Work(
            walk, split, work.tiles, work.chunks, work.few
        )
        return StepMetadata(rows=rows, batch=batch)

    def _hold(self, requests: int, blocks: int, rows: int) -> _Buffers:
        """The buffers; as large as the largest step from the beginning, so that none ever moves."""
        if self._buffers is None:
            limits = self.vllm_config.scheduler_config
            captured = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
            self._buffers = _Buffers(
                max(limits.max_num_seqs, captured, requests),
                blocks,
                max(limits.max_num_batched_tokens, captured, rows),
                self.device,
            )
        held = self._buffers
        if requests > held.table.shape[0] or rows > held.slot.numel():
            raise CapabilityError(
                f"a step of {requests} requests and {rows} rows exceeds what vLLM announced "
                f"({held.table.shape[0]} and {held.slot.numel()}); report this with your settings"
            )
        return held


def _cpu_batch(query_start: Tensor, kv_len: Tensor, table: Tensor, slot: Tensor) -> AttentionBatch:
    return AttentionBatch(
        query_start=query_start.to(torch.int32).contiguous(),
        kv_len=kv_len.to(torch.int32).contiguous(),
        block_table=(table * 2).to(torch.int32).contiguous(),
        slot=slot.to(torch.int64) + torch.div(slot, PAGE, rounding_mode="floor") * PAGE,
    )


class AlignedImpl(AttentionImpl):
    """Write keys and values, then attend, both by contract."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self._cache: tuple[int, Any] | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query [T, H, D]``, ``key, value [T, HK, D]``; writes ``output [T, H, D]``."""
        if attn_metadata is None:
            return output.fill_(0)  # vLLM measures memory without a batch
        rows, batch = attn_metadata.rows, attn_metadata.batch
        cache = self.halves(kv_cache)
        write_kv(cache, key[:rows], value[:rows], batch.slot)
        out = output[:rows].view(query[:rows].shape)
        paged_attention(query[:rows], cache, batch, scale=self.scale, out=out)
        tapped("attention", out, layer=layer.layer_name)
        return output

    def halves(self, kv_cache: Tensor) -> Any:
        """vLLM's buffer as pages of keys and pages of values, each half a block."""
        if self._cache is None or self._cache[0] != kv_cache.data_ptr():
            self._cache = (kv_cache.data_ptr(), half_blocks(
                kv_cache, self.num_kv_heads, self.head_size))  # fmt: skip
        return self._cache[1]


def half_blocks(kv_cache: Tensor, kv_heads: int, head_size: int) -> KVCache:
    """The contract's cache over a buffer of whole blocks; see the module."""
    flat = compat.flat_blocks(kv_cache)
    half = kv_heads * PAGE * head_size
    pages = flat.numel() // half
    assert pages % 2 == 0
    assert flat.numel() == pages * half
    keys, values = flat[: (pages - 1) * half], flat[half:]
    shapes = ((pages - 1, PAGE, kv_heads, head_size),) * 2
    if not kv_cache.is_cuda:
        shapes = ((pages - 1, kv_heads, head_size, PAGE), (pages - 1, kv_heads, PAGE, head_size))
    return KVCache(keys.view(shapes[0]), values.view(shapes[1]), kv_heads, head_size)


def unfit(layer: Any) -> str | None:
    """Why an attention layer cannot take the backend, or None."""
    unusual = [
        name
        for name, present in (
            ("a sliding window", layer.sliding_window is not None),
            ("sinks", layer.has_sink),
            ("another layer's cache", layer.kv_sharing_target_layer_name is not None),
            ("values of another head size", layer.head_size_v != layer.head_size),
            ("a quantised cache", layer.kv_cache_dtype not in compat.PLAIN_CACHES),
            ("attention that is not causal", layer.attn_type != AttentionType.DECODER),
            (f"head size {layer.head_size}", layer.head_size not in compat.head_sizes()),
            ("scores that are capped", bool(getattr(layer.impl, "logits_soft_cap", 0))),
            ("ALiBi", getattr(layer.impl, "alibi_slopes", None) is not None),
            ("a scale that is no number", not math.isfinite(layer.impl.scale)),
        )
        if present
    ]
    return ", ".join(unusual) or None


def put_on(layer: Any) -> None:
    """Give one ``Attention`` layer the backend."""
    layer.impl = AlignedImpl(
        layer.num_heads,
        layer.head_size,
        layer.impl.scale,
        layer.num_kv_heads,
        kv_cache_dtype=layer.kv_cache_dtype,
    )
    layer.attn_backend = AlignedAttention
