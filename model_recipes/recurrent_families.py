"""The recurrent mixers of transformers' models, cut into parts: stock arithmetic and contracts.

    Qwen3NextGatedDeltaNet     gated delta rule, a decay per value head     Qwen3-Next
    KimiLinearDeltaAttention   the same with a decay per key channel        Kimi-Linear
    NemotronHMamba2Mixer       Mamba-2 with groups of heads                 Nemotron-H

Under stock every part is the expression of transformers' code, and the recurrence its function:
chunks for several rows, one step of the recurrent form for a decode row. That is where its bits
come apart. Chunk sizes are the code's own: an attribute (Mamba-2) or the function's default.

Legend: T rows, B sequences, S rows of one, H value heads, K key size, V value size, D channels.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bindings import kernel
from .recurrent import Part, RecurrentContext, RecurrentLayer, Rows, Run, own_code

L2_EPS = 1e-6
"""transformers writes it as a literal in both delta rules."""
_CONVOLUTIONS = ("causal_conv1d_update", "causal_conv1d_fn", "apply_mask_to_padding_states")


def _alone(function: Callable[..., Tensor]) -> Run:
    """A part that needs no context."""
    return lambda _, rows: function(**rows)


class _Shared:
    """What the three have in common: the convolution. functions: what the code must have."""

    functions: tuple[str, ...] = ()

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.own: Any = module
        self.code = own_code(module)
        self.convolution: nn.Conv1d = self.own.conv1d

    def chunk_of(self, function: str) -> int:
        """The default chunk size of one of the code's functions."""
        return int(inspect.signature(self.code[function]).parameters["chunk_size"].default)

    def conv_part(self) -> Part:
        """The convolution with its activation; D channels."""
        conv, activation = self.convolution, self.own.activation
        update, whole = (self.code[f"causal_conv1d_{name}"] for name in ("update", "fn"))
        width = conv.kernel_size[0]

        def weights() -> tuple[Tensor, Tensor | None]:
            return conv.weight.squeeze(1), conv.bias

        def step(rows: Rows, state: Tensor | None, decode: bool) -> tuple[Tensor, Tensor]:
            x = rows[0].transpose(1, 2)
            if decode:
                state = cast(Tensor, state).clone()
                return update(x, state, *weights(), activation).transpose(1, 2), state
            seen = x if state is None else torch.cat([state, x], dim=-1)
            y = whole(seen, *weights(), activation=activation)[:, :, -x.shape[-1] :]
            last = F.pad(seen, (max(0, width - seen.shape[-1]), 0))[:, :, -width:]
            return y.transpose(1, 2), last

        def stock(context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
            return context.carry(self.layer, "conv", (rows["x"],), step)

        def aligned(context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
            return context.convolve(self.layer, rows["x"], *weights(), activation)

        names = ("conv1d.weight",) if conv.bias is None else ("conv1d.weight", "conv1d.bias")
        return Part(
            op_class="convolution", stock=stock, aligned=aligned, weights=names,
            alone=(False, False),
        )  # fmt: skip

    layer: RecurrentLayer

    def masked(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Rows of padding become zero, as in the module's own code."""
        return hidden if mask is None else self.code["apply_mask_to_padding_states"](hidden, mask)


class _Delta(_Shared):
    """Both delta rules. chunked, stepped: names of the code's functions."""

    chunked: str
    stepped: str
    divides: bool

    def delta_parts(self) -> dict[str, Part]:
        """l2 norms of q and k, the strength of an update, and the recurrence."""
        norm = self.code["l2norm"]

        def aligned_norm(x: Tensor) -> Tensor:
            return kernel("l2norm").l2norm(x, L2_EPS, divide=self.divides)

        def stock_norm(x: Tensor) -> Tensor:
            return norm(x.float().contiguous(), dim=-1, eps=L2_EPS)  # another layout, other bits

        unit = Part(op_class="l2norm", stock=_alone(stock_norm), aligned=_alone(aligned_norm))
        strength = Part(
            op_class="sigmoid", stock=_alone(lambda x: x.sigmoid()),
            aligned=_alone(lambda x: kernel("sigmoid").sigmoid(x)),
        )  # fmt: skip
        recurrence = Part(
            op_class=f"recurrence_{self.layer.kind}", stock=self._stock, aligned=self._aligned,
            alone=(False, False),
        )  # fmt: skip
        return {
            "conv": self.conv_part(), "q_norm": unit, "k_norm": unit, "beta": strength,
            "recurrence": recurrence,
        }  # fmt: skip

    def _stock(self, context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
        repeats = self.layer.value_heads // self.layer.key_heads

        def step(given: Rows, state: Tensor | None, decode: bool) -> tuple[Tensor, Tensor]:
            q, k, v, g, beta = given
            if repeats > 1:
                q, k = (x.repeat_interleave(repeats, dim=2) for x in (q, k))
            function = self.code[self.stepped if decode else self.chunked]
            return function(
                q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=False,
            )  # fmt: skip

        names = ("q", "k", "v", "g", "beta")
        given = tuple(rows[name] for name in names)
        return context.carry(self.layer, "recurrent", given, step)

    def _aligned(self, context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
        """The scale of q is one product, as in transformers' code."""
        q = rows["q"] * self.layer.key_dim**-0.5
        return context.recur(self.layer, q, rows["k"], rows["v"], rows["g"], rows["beta"])


class GatedDeltaNet(_Delta):
    """Qwen3-Next."""

    chunked, stepped = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    functions = (*_CONVOLUTIONS, "l2norm", chunked, stepped)
    divides = False

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        own = self.own
        self.layer = RecurrentLayer(
            index=own.layer_idx, path=path, kind="gated_delta", chunk=self.chunk_of(self.chunked),
            key_heads=own.num_k_heads, value_heads=own.num_v_heads, key_dim=own.head_k_dim,
            value_dim=own.head_v_dim, channels=own.conv_dim,
        )  # fmt: skip

        def stock_decay(a: Tensor) -> Tensor:
            return -own.A_log.float().exp() * F.softplus(a.float() + own.dt_bias)

        def decay(a: Tensor) -> Tensor:
            return kernel("decay").decay_gate(a, own.A_log, own.dt_bias)

        self.parts = self.delta_parts() | {
            "decay": Part(
                op_class="decay", stock=_alone(stock_decay), aligned=_alone(decay),
                weights=("A_log", "dt_bias"),
            )
        }  # fmt: skip

    def compute(self, hidden: Tensor, mask: Tensor | None, run: Callable[..., Tensor]) -> Tensor:
        """See :class:`.recurrent.Mixer`."""
        own, hidden = self.own, self.masked(hidden, mask)
        q, k, v, z, b, a = own.fix_query_key_value_ordering(
            own.in_proj_qkvz(hidden), own.in_proj_ba(hidden)
        )
        mixed = run("conv", x=torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1).flatten(0, 1))
        q, k, v = mixed.split([own.key_dim, own.key_dim, own.value_dim], dim=-1)
        q, k = (x.unflatten(-1, (own.num_k_heads, -1)) for x in (q, k))
        o = run(
            "recurrence",
            q=run("q_norm", x=q),
            k=run("k_norm", x=k),
            v=v.unflatten(-1, (own.num_v_heads, -1)),
            g=run("decay", a=a.flatten(0, 1)),
            beta=run("beta", x=b.flatten(0, 1)),
        )
        o = own.norm(o.to(hidden.dtype).view(z.shape), z.contiguous())
        return own.out_proj(o.flatten(2))


class DeltaAttention(_Delta):
    """Kimi-Linear."""

    chunked, stepped = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
    functions = (*_CONVOLUTIONS, "l2norm", chunked, stepped)
    divides = True

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        own, gate = self.own, self.own.forget_gate
        self.layer = RecurrentLayer(
            index=own.layer_idx, path=path, kind="kda", chunk=self.chunk_of(self.chunked),
            key_heads=own.num_heads, value_heads=own.num_heads, key_dim=own.head_dim,
            value_dim=own.head_dim, channels=own.conv_dim,
        )  # fmt: skip

        def stock_decay(a: Tensor) -> Tensor:
            x = a.float() + gate.dt_bias.float().view(a.shape[1:])
            softplus = torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
            return -torch.exp(gate.A_log.float().view(-1, 1)) * softplus

        def decay(a: Tensor) -> Tensor:
            return kernel("decay").decay_gate(a, gate.A_log, gate.dt_bias)

        self.parts = self.delta_parts() | {
            "decay": Part(
                op_class="decay", stock=_alone(stock_decay), aligned=_alone(decay),
                weights=("forget_gate.A_log", "forget_gate.dt_bias"),
            )
        }  # fmt: skip

    def compute(self, hidden: Tensor, mask: Tensor | None, run: Callable[..., Tensor]) -> Tensor:
        """See :class:`.recurrent.Mixer`."""
        own, hidden = self.own, self.masked(hidden, mask)
        heads = (own.num_heads, own.head_dim)
        mixed = torch.cat([project(hidden) for project in (own.q_proj, own.k_proj, own.v_proj)], -1)
        q, k, v = run("conv", x=mixed.flatten(0, 1)).unflatten(-1, (3, *heads)).unbind(1)
        forget = own.forget_gate.f_b_proj(own.forget_gate.f_a_proj(hidden))
        o = run(
            "recurrence",
            q=run("q_norm", x=q),
            k=run("k_norm", x=k),
            v=v,
            g=run("decay", a=forget.unflatten(-1, heads).flatten(0, 1)),
            beta=run("beta", x=own.b_proj(hidden).flatten(0, 1)),
        )
        gate = own.g_b_proj(own.g_a_proj(hidden)).unflatten(-1, heads)
        return own.o_proj(own.o_norm(o.to(hidden.dtype).view(gate.shape), gate).flatten(2))


class Mamba2(_Shared):
    """Nemotron-H. q, k, v of the recurrence are C, B and dt x."""

    functions = (*_CONVOLUTIONS, "mamba2_chunk_scan", "mamba2_selective_state_update")

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__(path, module)
        own = self.own
        self.layer = RecurrentLayer(
            index=own.layer_idx, path=path, kind="ssd", chunk=own.chunk_size,
            key_heads=own.n_groups, value_heads=own.num_heads, key_dim=own.ssm_state_size,
            value_dim=own.head_dim, channels=own.conv_dim,
        )  # fmt: skip
        low, high = own.time_step_limit

        def stock_step(context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
            """transformers clamps chunks and forgets to for decode rows, where it computes each
            head's step once per column: another place in a vector, other bits."""

            def step(given: Rows, _: Tensor | None, decode: bool) -> tuple[Tensor, None]:
                dt, bias = given[0], own.dt_bias.to(given[0].dtype)
                if not decode:
                    return F.softplus(dt + bias).clamp(low, high), None
                columns = dt[..., None].expand(*dt.shape, own.head_dim) + bias[:, None]
                return F.softplus(columns)[..., 0], None

            return context.carry(self.layer, "time_step", (rows["dt"],), step)

        def time_step(dt: Tensor) -> Tensor:
            return kernel("time_step").time_step(dt, own.dt_bias, low=low, high=high)

        def stock_discretised(x: Tensor, dt: Tensor) -> Tensor:
            g = -torch.exp(own.A_log.float()) * dt.float()
            return torch.cat([x.float() * dt[..., None].float(), g[..., None]], dim=-1)

        def discretised(x: Tensor, dt: Tensor) -> Tensor:
            v, g = kernel("discretised").discretised(x, dt, own.A_log)
            return torch.cat([v, g[..., None]], dim=-1)

        def stock_skip(o: Tensor, x: Tensor) -> Tensor:
            if o.dtype != torch.float32:  # a decode row of a narrow model
                return o + x * own.D[:, None]
            return o + own.D[:, None] * x.float()

        self.parts = {
            "conv": self.conv_part(),
            "time_step": Part(
                op_class="time_step", stock=stock_step, aligned=_alone(time_step),
                weights=("dt_bias",), alone=(False, True),
            ),
            "discretised": Part(
                op_class="discretised", stock=_alone(stock_discretised),
                aligned=_alone(discretised), weights=("A_log",),
            ),
            "recurrence": Part(
                op_class="recurrence_ssd", stock=self._stock, aligned=self._aligned,
                alone=(False, False),
            ),
            "skip": Part(
                op_class="skip", stock=_alone(stock_skip),
                aligned=_alone(lambda o, x: kernel("skip").skip(o.float(), x, own.D)),
                weights=("D",),  # a stock decode row below it may be narrow
            ),
        }  # fmt: skip

    def _stock(self, context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
        own = self.own
        chunked, stepped = (
            self.code[f"mamba2_{name}"] for name in ("chunk_scan", "selective_state_update")
        )

        def step(given: Rows, state: Tensor | None, decode: bool) -> tuple[Tensor, Tensor]:
            c, b, v, g, x, dt = given
            if decode:
                state = cast(Tensor, state).clone()
                a = -torch.exp(own.A_log.float())[:, None, None]
                sizes = (*x.shape[2:], b.shape[-1])
                columns = dt[:, 0, :, None].expand(*x[:, 0].shape).contiguous()
                y = stepped(state, x[:, 0], columns, a.expand(sizes), b[:, 0], c[:, 0])
                return y[:, None], state
            # Products with dt = 1 are exact: v and g were multiplied before.
            return chunked(
                v, torch.ones_like(g), g, b, c, chunk_size=own.chunk_size, initial_states=state,
                return_final_states=True,
            )  # fmt: skip

        names = ("q", "k", "v", "g", "x", "dt")
        return context.carry(self.layer, "recurrent", tuple(rows[name] for name in names), step)

    def _aligned(self, context: RecurrentContext, rows: Mapping[str, Tensor]) -> Tensor:
        return context.recur(self.layer, rows["q"], rows["k"], rows["v"], rows["g"], None)

    def compute(self, hidden: Tensor, mask: Tensor | None, run: Callable[..., Tensor]) -> Tensor:
        """See :class:`.recurrent.Mixer`."""
        own = self.own
        parts = own.in_proj(self.masked(hidden, mask)).split(
            [own.intermediate_size, own.conv_dim, own.num_heads], dim=-1
        )
        gate, mixed, dt = parts
        mixed = run("conv", x=mixed.flatten(0, 1))
        if mask is not None:
            mixed = self.masked(mixed.unflatten(0, hidden.shape[:2]), mask).flatten(0, 1)
        groups = own.n_groups * own.ssm_state_size
        x, b, c = mixed.split([own.intermediate_size, groups, groups], dim=-1)
        b, c = (each.unflatten(-1, (own.n_groups, -1)) for each in (b, c))
        x = x.unflatten(-1, (own.num_heads, -1))
        dt = run("time_step", dt=dt.flatten(0, 1))
        v, g = run("discretised", x=x, dt=dt).split([own.head_dim, 1], dim=-1)
        o = run("recurrence", q=c, k=b, v=v, g=g[..., 0], x=x, dt=dt)
        y = run("skip", o=o, x=x).flatten(1).unflatten(0, hidden.shape[:2])
        return own.out_proj(own.norm(y, gate).to(hidden.dtype))


FAMILIES: Mapping[str, type[GatedDeltaNet] | type[DeltaAttention] | type[Mamba2]] = {
    "Qwen3NextGatedDeltaNet": GatedDeltaNet,
    "KimiLinearDeltaAttention": DeltaAttention,
    "NemotronHMamba2Mixer": Mamba2,
}
"""By class name; others are named by the audit."""
