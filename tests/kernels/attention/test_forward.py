"""Attention's forward: the definition's bits, head groups, cache, accuracy, refusals."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zeromismatch.kernels import bits
from zeromismatch.kernels.attention import (
    AttentionBatch,
    cpu,
    new_cache,
    packed_attention,
    packed_batch,
    paged_attention,
    read_kv,
    write_kv,
)
from zeromismatch.kernels.contract import implementations
from zeromismatch.kernels.errors import ContractError
from zeromismatch.kernels.reference.attention import attention as definition

DTYPES = (torch.float32, torch.bfloat16)
SETTINGS = (
    {"dim": 64},
    {"dim": 16, "window": 20},
    {"heads": 4, "dim": 80, "window": 16, "softcap": 5.0},
    {"dim": 16, "sinks": True, "kv_heads": 1},
    {"dim": 128, "heads": 2, "kv_heads": 2, "softcap": 30.0, "sinks": True},
)


def cached(
    lengths: list[int], kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered pages with cancelling and unequal keys; NaN where no key lies."""
    cache = new_cache(sum(-(-n // 16) for n in lengths) + 2, kv_heads, dim, dtype=dtype)
    pages = torch.randperm(cache.num_pages)
    table = torch.full((len(lengths), -(-max(lengths) // 16)), -7, dtype=torch.int32)
    for b, length in enumerate(lengths):
        count = -(-length // 16)
        table[b, :count], pages = pages[:count], pages[count:]
        slot = table[b].long()[torch.arange(length) // 16] * 16 + torch.arange(length) % 16
        size = torch.exp2(torch.randint(-6, 5, (length, 1, 1)).float())
        k, v = ((torch.randn(length, kv_heads, dim) * size).to(dtype) for _ in range(2))
        write_kv(cache, k, v, slot)
    return cache.k, cache.v, table


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_the_bits_of_the_definition(
    dtype: torch.dtype, setting: dict[str, object]
) -> None:
    options = {"heads": 6, "kv_heads": 2, "window": 0, "softcap": 0.0, "sinks": False} | setting
    heads, dim = options["heads"], options["dim"]
    lengths, counts = [70, 50, 33, 17, 3], [70, 1, 3, 9, 0]
    k, v, table = cached(lengths, options["kv_heads"], dim, dtype)
    sinks = torch.tensor([-torch.inf, *torch.randn(heads - 1)]) if options["sinks"] else None
    arguments = (
        (torch.randn(sum(counts), heads, dim) * 2).to(dtype), k, v,
        torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32), table,
        dim**-0.5, options["window"], options["softcap"], sinks,
    )  # fmt: skip
    wanted = definition(*arguments)
    assert all(each.isfinite().all() for each in wanted)
    for each in implementations(cpu.CONTRACTS[dtype].id):
        if each.missing() is None:
            got = each.run(*arguments)
            assert all(map(bits.equal, got, wanted)), each.name


@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (80, 4), (8, 2), (9, 3)])
def test_query_head_reads_kv_head_of_its_group(heads: int, kv_heads: int) -> None:
    """Replay of FreeToken PR 177: groups larger than a tile and no multiple of it."""
    q = torch.randn(40, heads, 16)
    k, v = torch.randn(40, kv_heads, 16), torch.randn(40, kv_heads, 16)
    start = torch.tensor([0, 40])
    grouped = packed_attention(q, k, v, start, scale=0.25)
    repeated = [x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v)]
    assert bits.equal(packed_attention(q, *repeated, start, scale=0.25), grouped)
    tiled = [x.repeat(1, heads // kv_heads, 1) for x in (k, v)]
    assert not bits.equal(packed_attention(q, *tiled, start, scale=0.25), grouped)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40, 256])
def test_cache_returns_what_was_written(dtype: torch.dtype, dim: int) -> None:
    cache = new_cache(6, 2, dim, dtype=dtype)
    table = torch.tensor([4, 0, 3])
    slot = table[torch.arange(37) // 16] * 16 + torch.arange(37) % 16
    k, v = (torch.randn(37, 2, dim).to(dtype) for _ in range(2))
    k[0, 0, 0], k[1, 1, 2], v[5, 0, 1], v[6, 1, 3] = -0.0, torch.nan, -torch.inf, 1e-40
    for rows in (slice(0, 20), slice(20, 37)):
        write_kv(cache, k[rows], v[rows], slot[rows])
    read_k, read_v = read_kv(cache, table, 37)
    assert bits.equal(read_k, k)
    assert bits.equal(read_v, v)
    assert read_kv(cache, table, 0)[0].shape == (0, 2, dim)


def attention_fp64(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return (scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_against_fp64_is_at_most_twice_that_of_stock(dtype: torch.dtype) -> None:
    q, k, v = ((torch.randn(300, heads, 64) * 2).to(dtype) for heads in (4, 2, 2))
    exact = attention_fp64(q, k, v)
    ours = packed_attention(q, k, v, torch.tensor([0, 300]), scale=0.125)
    stock = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()


def test_a_window_as_long_as_the_request_changes_nothing() -> None:
    q, k, v = torch.randn(50, 2, 32), torch.randn(50, 2, 32), torch.randn(50, 2, 32)
    start = torch.tensor([0, 50])
    whole = packed_attention(q, k, v, start, scale=0.2)
    assert bits.equal(packed_attention(q, k, v, start, scale=0.2, window=50), whole)
    shorter = packed_attention(q, k, v, start, scale=0.2, window=49)
    assert bits.equal_rows(shorter, whole).tolist() == [True] * 49 + [False]


def test_a_window_of_one_returns_the_value_itself() -> None:
    q, k, v = torch.randn(40, 4, 32), torch.randn(40, 2, 32), torch.randn(40, 2, 32)
    out = packed_attention(q, k, v, torch.tensor([0, 40]), scale=0.2, window=1)
    assert bits.equal(out, v.repeat_interleave(2, dim=1))


def test_layouts_and_empty_batches() -> None:
    q, k, v = torch.randn(4, 20, 32), torch.randn(2, 20, 32), torch.randn(2, 20, 32)
    views = [x.transpose(0, 1) for x in (q, k, v)]
    start = torch.tensor([0, 12, 12, 20])
    assert bits.equal(
        packed_attention(*views, start, scale=0.2),
        packed_attention(*(x.contiguous() for x in views), start, scale=0.2),
    )
    nothing = packed_attention(*(x[:0] for x in views), torch.tensor([0]), scale=0.2)
    assert nothing.shape == (0, 4, 32)
    assert packed_attention(*(x[:0] for x in views), torch.tensor([0, 0]), scale=0.2).shape == (
        0,
        4,
        32,
    )


def test_non_finite_inputs_stay_visible() -> None:
    for spoil in (torch.nan, torch.inf, -torch.inf):
        q, k, v = torch.rand(40, 2, 16) + 1, torch.randn(40, 1, 16), torch.randn(40, 1, 16)
        k[20] = spoil
        out = packed_attention(q, k, v, torch.tensor([0, 40]), scale=0.25)
        assert out[:20].isfinite().all()
        if spoil > 0 or spoil != spoil:
            assert out[20:].isnan().all()


def batch_of(rows: int, keys: int, pages: list[int]) -> AttentionBatch:
    return AttentionBatch(
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        kv_len=torch.tensor([keys], dtype=torch.int32),
        block_table=torch.tensor([pages], dtype=torch.int32),
        slot=torch.arange(rows),
    )


@pytest.mark.parametrize(
    ("rows", "keys", "pages"),
    [(2, 1, [0]), (1, 17, [0]), (1, 17, [0, 4]), (1, 17, [0, -1]), (1, 64, [0, 1, 2])],
)
def test_a_batch_that_would_read_outside_is_refused(rows: int, keys: int, pages: list[int]) -> None:
    cache = new_cache(4, 1, 16, dtype=torch.float32)
    with pytest.raises(ContractError, match="request 0 has more queries than keys"):
        paged_attention(torch.randn(rows, 1, 16), cache, batch_of(rows, keys, pages), scale=1.0)


def test_tensors_outside_the_contract_are_refused() -> None:
    cache = new_cache(4, 2, 16, dtype=torch.float32)
    q, kv = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    start = torch.tensor([0, 3])
    with pytest.raises(ContractError, match="sees nothing"):
        packed_attention(q, kv, kv, start, scale=1.0, window=0)
    with pytest.raises(ContractError, match="not positive"):
        packed_attention(q, kv, kv, start, scale=1.0, softcap=-1.0)
    with pytest.raises(ContractError, match="one per query head"):
        packed_attention(q, kv, kv, start, scale=1.0, sinks=torch.zeros(2))
    with pytest.raises(ContractError, match="number of rows"):
        packed_attention(q, kv, kv, torch.tensor([0, 2]), scale=1.0)
    with pytest.raises(ContractError, match="ascending vector from 0"):
        packed_batch(torch.tensor([0, 5, 3]))
    with pytest.raises(ContractError, match="whole groups"):
        packed_attention(q[:, :3], kv, kv, start, scale=1.0)
    with pytest.raises(ContractError, match="in the same dtype"):
        packed_attention(q.bfloat16(), kv, kv, start, scale=1.0)
    with pytest.raises(ContractError, match="slots reach from"):
        write_kv(cache, kv, kv, torch.tensor([0, 1, 64]))
    with pytest.raises(ContractError, match="do not fit a cache"):
        write_kv(cache, kv[:, :1], kv[:, :1], torch.arange(3))
    with pytest.raises(ContractError, match="no cache for"):
        new_cache(4, 2, 16, dtype=torch.float16)
    with pytest.raises(ContractError, match="not between 1 and 256"):
        new_cache(4, 2, 257, dtype=torch.float32)
    with pytest.raises(ContractError, match="build them so"):
        AttentionBatch(start, start, start[None], start)
    one = torch.tensor([3], dtype=torch.int32)
    short = AttentionBatch(
        torch.tensor([0, 2], dtype=torch.int32), one, one[None] * 0, torch.arange(3)
    )
    with pytest.raises(ContractError, match="does not run from 0"):
        paged_attention(q, cache, short, scale=1.0)
