"""Pages of recurrent layers in vLLM's cache blocks: one block holds one chunk.

A recurrent layer keeps, per request and chunk, the chunk's raw rows and the state at its end
(``kernels/recurrence``). vLLM's unit of memory is a block of tokens, handed out as a request grows,
hit whole by prefixes, dropped by preemption: with blocks of one chunk that is the page that the
contract wants. So every layer of the model, attention too, announces itself to vLLM as one that
keeps something for every token, in blocks of one chunk; vLLM then has a single group of layers and
a buffer of its own for each. Inside a layer's buffer the parts lie one after the other, each an
array over all blocks.

The price: a state for every chunk of every request, not one for every request.

Nothing here is imported without vLLM. Legend: T rows, P blocks, C rows per chunk, D channels of the
convolution, HK, HV key and value heads, K, V sizes.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ....kernels.attention import PAGE, KVCache
from ....kernels.convolution import ConvolutionCache
from ....kernels.errors import CapabilityError
from ....kernels.recurrence import RecurrenceCache, RowBatch
from ....kernels.recurrence.pages import Filled
from ....model_recipes.recurrent import RecurrentLayer
from ..recurrent_batch import chunk_bytes
from . import compat
from .attention import AlignedAttention, AlignedImpl


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesMetadata:
    """One step, for all recurrent layers; rows behind ``rows`` are padding."""

    rows: int
    batch: RowBatch


class PagesBackend(AlignedAttention):
    """What vLLM asks of the layers that :class:`RecurrentPages` are: as attention's, with which
    they share a block table, but for what a step needs.
    """

    @staticmethod
    def get_builder_cls() -> Any:
        return PagesBuilder


class PagesBuilder(AttentionMetadataBuilder[PagesMetadata]):
    """vLLM's block tables in units of a chunk; the tensors stay where they are, for graphs."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = None

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.pieces = layers[layer_names[0]].layer.chunk // PAGE
        self._table: Tensor | None = None
        self._slot: Tensor | None = None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagesMetadata:
        common = common_attn_metadata
        requests, rows = common.num_reqs, common.num_actual_tokens
        table, slot = self._held(requests, rows, common.block_table_tensor)
        of_chunks = common.block_table_tensor[:requests, :: self.pieces]
        torch.div(of_chunks, self.pieces, rounding_mode="floor", out=table)
        slot.copy_(common.slot_mapping[:rows])
        query_start, length = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        batch = RowBatch(query_start.to(torch.int32), length.to(torch.int32), table, slot)
        return PagesMetadata(rows=rows, batch=batch)

    def _held(self, requests: int, rows: int, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """Table and slots of this step: a graph's at one place, on a CPU new ones."""
        chunks = -(-theirs.shape[1] // self.pieces)
        if theirs.device.type == "cpu":
            return (torch.empty(requests, chunks, dtype=torch.int32),
                    torch.empty(rows, dtype=torch.int64))  # fmt: skip
        if self._table is None or self._slot is None:
            limits = self.vllm_config.scheduler_config
            captured = self.vllm_config.compilation_config.max_cudagraph_capture_size or 0
            most = max(limits.max_num_seqs, captured, requests)
            wide = max(limits.max_num_batched_tokens, captured, rows)
            self._table = torch.zeros(most, chunks, dtype=torch.int32, device=theirs.device)
            self._slot = torch.zeros(wide, dtype=torch.int64, device=theirs.device)
        if requests > len(self._table) or rows > len(self._slot):
            raise CapabilityError(
                f"a step of {requests} requests and {rows} rows exceeds what vLLM announced "
                f"({len(self._table)} and {len(self._slot)}); report this with your settings"
            )
        return self._table[:requests], self._slot[:rows]


class _Layer(nn.Module, AttentionLayerBase):
    """A layer that vLLM gives a buffer to, under ``name``; one block is ``chunk`` tokens."""

    def __init__(self, vllm_config: Any, name: str, chunk: int) -> None:
        super().__init__()
        known = vllm_config.compilation_config.static_forward_context
        assert name not in known
        known[name] = self
        self.layer_name, self.chunk = name, chunk
        self.kv_cache: Any = torch.tensor([])
        self._views: tuple[int, Any] | None = None

    def buffer(self) -> Tensor:
        """The layer's buffer; older releases bind one in a list per pipeline stage."""
        kv_cache = self.kv_cache[0] if isinstance(self.kv_cache, list) else self.kv_cache
        return cast(Tensor, kv_cache)

    def views(self) -> Any:
        """What the contract calls the cache, over this buffer."""
        buffer = self.buffer()
        if self._views is None or self._views[0] != buffer.data_ptr():
            self._views = (buffer.data_ptr(), self._over(buffer))
        return self._views[1]

    @abstractmethod
    def _over(self, buffer: Tensor) -> Any:
        """The cache's views into the buffer."""


class AttentionPages(_Layer):
    """Keys and values of one attention layer."""

    def __init__(
        self, vllm_config: Any, name: str, chunk: int, *, heads: int, kv_heads: int, head_size: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, name, chunk)
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, head_size
        self.dtype = dtype
        self.impl = cast(Any, AlignedImpl(heads, head_size, 1.0, kv_heads))

    def get_attn_backend(self) -> Any:
        return AlignedAttention

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return FullAttentionSpec(
            block_size=self.chunk, num_kv_heads=self.num_kv_heads, head_size=self.head_size,
            dtype=self.dtype,
        )  # fmt: skip

    def _over(self, buffer: Tensor) -> KVCache:
        return self.impl.halves(buffer)


@dataclass(frozen=True, slots=True)
class Views:
    """The two caches of a recurrent layer, over one buffer."""

    recurrence: RecurrenceCache
    convolution: ConvolutionCache


class RecurrentPages(_Layer):
    """Rows and states of one recurrent layer."""

    def __init__(
        self, vllm_config: Any, name: str, layer: RecurrentLayer, dtype: torch.dtype
    ) -> None:
        super().__init__(vllm_config, name, layer.chunk)
        self.layer, self.dtype = layer, dtype

    def get_attn_backend(self) -> Any:
        return PagesBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """A block of as many bytes: fp32 keys and values of one head."""
        floats = -(-chunk_bytes(self.layer, self.dtype) // (2 * 4 * self.chunk))
        return FullAttentionSpec(
            block_size=self.chunk, num_kv_heads=1, head_size=floats, dtype=torch.float32
        )

    def _over(self, buffer: Tensor) -> Views:
        layer, flat = self.layer, compat.flat_blocks(buffer).view(torch.uint8)
        spec = self.get_kv_cache_spec(None)
        blocks = flat.numel() // (8 * spec.head_size * self.chunk)
        decays = (layer.value_heads, layer.key_dim) if layer.per_channel else (layer.value_heads,)
        shapes = (
            ((layer.chunk, layer.key_heads, layer.key_dim), layer.rows),
            ((layer.chunk, layer.value_heads, layer.page_width), layer.rows),
            ((layer.chunk, *decays), torch.float32),
            ((layer.value_heads, layer.key_dim, layer.page_width), torch.float32),
            ((layer.chunk, layer.channels), self.dtype),
        )
        at, parts = 0, list[Tensor]()
        for shape, dtype in shapes:
            size = blocks * math.prod(shape) * dtype.itemsize
            parts.append(flat[at : at + size].view(dtype).view(blocks, *shape))
            at += size
        assert at <= flat.numel()
        k, u, decay, end, rows = parts
        return Views(
            RecurrenceCache(layer.chunk, k, u, decay, end, Filled(blocks, layer.chunk)),
            ConvolutionCache(layer.chunk, rows, Filled(blocks, layer.chunk)),
        )
