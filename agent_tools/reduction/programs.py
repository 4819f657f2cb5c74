"""What an operator computed, as a line of Python that needs no engine.

Each operator class has a line for ``stock`` (plain torch, as transformers computes it) and one for
its contract (``zeromismatch.kernels``). The line is evaluated here while a case shrinks, and stands
in the generated file word for word. ``t`` holds the tensors by name, ``s`` settings; rows are
dimension 0. Attention has rows ``[start, stop)`` of one sequence.

    program("linear", "stock")    ->  Program(line="F.linear(t['x'], t['weight'], t.get('bias'))")

Legend of layouts: the name of each axis of each tensor; equal names shrink together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.errors import CapabilityError
from ..compare import STATE_CLASSES

Layout = Mapping[str, tuple[str, ...]]

_ROW_LAYOUTS: dict[str, Layout] = {
    "linear": {"x": ("rows", "inner"), "weight": ("outputs", "inner"), "bias": ("outputs",)},
    "lm_head": {"h": ("rows", "inner"), "weight": ("outputs", "inner"), "bias": ("outputs",)},
    "rmsnorm": {"x": ("rows", "inner"), "weight": ("inner",)},
    "rmsnorm_wide": {"x": ("rows", "inner"), "weight": ("inner",)},
    "gated": {"gate": ("rows", "inner"), "up": ("rows", "inner")},
    "gated_gelu": {"gate": ("rows", "inner"), "up": ("rows", "inner")},
    "rotary": {"x": ("rows", "heads", "size"), "cos": ("rows", "size"), "sin": ("rows", "size")},
    "logprob": {"logits": ("rows", "vocabulary"), "targets": ("rows",), "temperature": ("rows",)},
    "attention": {
        "q": ("positions", "groups", "group", "size"),
        "k": ("positions", "groups", "size"),
        "v": ("positions", "groups", "size"),
    },
}
SHRINKABLE = ("outputs", "groups", "group", "heads", "inner")
"""Axes along which a case may become smaller, in this order; others carry a meaning."""

_STOCK = {
    "linear": "F.linear(t['x'], t['weight'], t.get('bias'))",
    "lm_head": "F.linear(t['h'], t['weight'], t.get('bias')).float()",
    "rmsnorm": "stock_rmsnorm(t['x'], t['weight'], s['eps'], s['unit_offset'])",
    "rmsnorm_wide": "stock_rmsnorm_wide(t['x'], t['weight'], s['eps'])",
    "gated": "F.silu(t['gate']) * t['up']",
    "gated_gelu": "F.gelu(t['gate'], approximate='tanh') * t['up']",
    "logprob": "torch.log_softmax(t['logits'] / t['temperature'][:, None], -1)"
    ".gather(1, t['targets'][:, None])[:, 0]",
    "attention": "stock_attention(t['q'], t['k'], t['v'], s['scale'], s['start'], s['stop'])",
}
_KERNEL = {
    "linear": ("linear", "linear(t['x'], t['weight'], t.get('bias'))"),
    "lm_head": ("logprob", "lm_head(t['h'], t['weight'], t.get('bias'))"),
    "rmsnorm": ("rmsnorm", "rmsnorm(t['x'], t['weight'], s['eps'], unit_offset=s['unit_offset'])"),
    "rmsnorm_wide": ("rmsnorm", "rmsnorm_wide(t['x'], t['weight'], s['eps'])"),
    "gated": ("gated", "silu_mul(t['gate'], t['up'])"),
    "gated_gelu": ("gated", "gelu_mul(t['gate'], t['up'])"),
    "rotary": ("rotary", "apply_rotary(t['x'], t['cos'], t['sin'])"),
    "logprob": ("logprob", "logprob(t['logits'], t['targets'], t['temperature'])"),
    "attention": (
        "attention",
        "paged(t['q'], t['k'], t['v'], s['scale'], s['start'], s['stop'])",
    ),
}
_PAGED = '''
def paged(q, k, v, scale, start, stop):
    """Rows [start, stop) of one sequence over a paged cache; q is [S, HK, G, D]."""
    pages = -(-stop // PAGE)
    cache = new_cache(pages, k.shape[1], k.shape[2], dtype=k.dtype)
    write_kv(cache, k[:stop].contiguous(), v[:stop].contiguous(), torch.arange(stop))
    batch = AttentionBatch(
        query_start=torch.tensor([0, stop - start], dtype=torch.int32),
        kv_len=torch.tensor([stop], dtype=torch.int32),
        block_table=torch.arange(pages, dtype=torch.int32)[None],
        slot=torch.arange(start, stop),
    )
    return paged_attention(q[start:stop].flatten(1, 2), cache, batch, scale=scale)
'''
_STOCK_ATTENTION = '''
def stock_attention(q, k, v, scale, start, stop):
    """Rows [start, stop) of one sequence as the framework attends; q is [S, HK, G, D]."""
    q = q[start:stop].flatten(1, 2).transpose(0, 1)[None]
    k, v = (x[:stop].transpose(0, 1)[None] for x in (k, v))
    rows, heads = stop - start, q.shape[1]
    if rows in (1, stop):
        out = F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=rows > 1, enable_gqa=heads != k.shape[1]
        )
    else:
        seen = torch.arange(stop) <= torch.arange(start, stop)[:, None]
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out[0].transpose(0, 1)
'''
_STOCK_RMSNORM = '''
def stock_rmsnorm(x, weight, eps, unit_offset):
    """RMSNorm as transformers writes it (unit_offset: Gemma's)."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype) if unit_offset else weight * y.to(x.dtype)
'''
_STOCK_RMSNORM_WIDE = '''
def stock_rmsnorm_wide(x, weight, eps):
    """RMSNorm as transformers writes it for gpt_oss: one rounding, after the weight."""
    wide = x.float()
    return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps))).to(x.dtype)
'''
_ATTENTION_IMPORT = (
    "from zeromismatch.kernels.attention import (\n"
    "    PAGE,\n    AttentionBatch,\n    new_cache,\n    paged_attention,\n    write_kv,\n)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One side's computation as text: imports, definitions, and the line itself."""

    line: str
    imports: str = ""
    definitions: str = ""

    def compiled(self) -> Callable[[Mapping[str, Tensor], Mapping[str, Any]], Tensor]:
        """The line as a function of tensors and settings."""
        names: dict[str, Any] = {"torch": torch, "F": functional}
        exec(f"{self.imports}\n{self.definitions}", names)
        return eval(f"lambda t, s: {self.line}", names)


def layout_of(op_class: str) -> Layout:
    """Names of the axes; CapabilityError where no repro can be written for a class."""
    if op_class in STATE_CLASSES and op_class not in _ROW_LAYOUTS:
        raise CapabilityError(
            f"no repro of one operator can be written for {op_class}: its state comes from all "
            "rows before; `zm repro DIVERGENCE --whole` writes one that runs both engines"
        )
    if op_class not in _ROW_LAYOUTS:
        raise CapabilityError(
            f"no repro can be written for {op_class}: it moves or looks up what others computed; "
            "look at what the two engines handed to it (`zm localize --out DIR` keeps the traces)"
        )
    return _ROW_LAYOUTS[op_class]


def program(op_class: str, contract: str | None) -> Program:
    """The program of a class under a contract, or stock (None)."""
    layout_of(op_class)
    if contract is None:
        if op_class not in _STOCK:
            raise CapabilityError(
                f"no stock program is written for {op_class}; give it a contract, or compare sides "
                "that agree on it"
            )
        definitions = {
            "attention": _STOCK_ATTENTION, "rmsnorm": _STOCK_RMSNORM,
            "rmsnorm_wide": _STOCK_RMSNORM_WIDE,
        }  # fmt: skip
        return Program(line=_STOCK[op_class], definitions=definitions.get(op_class, ""))
    folder, line = _KERNEL[op_class]
    if op_class == "attention":
        return Program(line=line, imports=_ATTENTION_IMPORT, definitions=_PAGED)
    function = line.partition("(")[0]
    return Program(line=line, imports=f"from zeromismatch.kernels.{folder} import {function}")
