"""Row operators beside torch's and the copy bandwidth: norms, activations, rotary, logprob,
embedding.
"""

import torch
import torch.nn.functional as F
from gpu_measure import BF16, HEADS, SIZE, VOCABULARY, Call, Row, eager_median, medians, randn

from zeromismatch.kernels.embedding import gpu as embedding
from zeromismatch.kernels.gated import gpu as gated
from zeromismatch.kernels.logprob import gpu as logprob
from zeromismatch.kernels.rmsnorm import gpu as rmsnorm
from zeromismatch.kernels.rotary import gpu as rotary


def row_operators(bandwidth: float) -> list[Row]:
    rows = []

    def add(name: str, moved: int, ours: Call, stock: Call | None = None) -> None:
        times = medians([ours] * 4, *([[stock] * 4] if stock else []))
        rows.append(
            {
                "work": name,
                "ours_us": times[0] * 1e3,
                "torch_us": times[1] * 1e3 if stock else None,
                "share_of_copy": moved / times[0] / 1e6 / bandwidth,
            }
        )

    for m, h in ((4096, 4096), (8192, 2048), (8192, 4096), (16384, 5120)):
        x, r, w = randn(m, h), randn(m, h), randn(h)
        add(
            f"RMSNorm {m}x{h}",
            4 * m * h,
            lambda x=x, w=w: rmsnorm.forward(x, w, 1e-6),
            lambda x=x, w=w, h=h: F.rms_norm(x, (h,), w, 1e-6),
        )
        add(
            f"RMSNorm + residual {m}x{h}",
            8 * m * h,
            lambda x=x, r=r, w=w: rmsnorm.forward(x, w, 1e-6, False, r),
        )
        add(
            f"RMSNorm backward {m}x{h}",
            6 * m * h,
            lambda x=x, r=r, w=w: rmsnorm.backward(r, x, w, 1e-6),
        )
    x, w = randn(8192 * 40, 128), randn(128)
    add(
        "RMSNorm per head 8192x40x128",
        4 * x.numel(),
        lambda: rmsnorm.forward(x, w, 1e-6),
    )
    dy = torch.randn_like(x)
    add(
        "RMSNorm backward per head 8192x40x128",
        6 * x.numel(),
        lambda: rmsnorm.backward(dy, x, w, 1e-6),
    )
    both = randn(8192, 24576)
    add(
        "SiLU-mul 8192x12288",
        3 * both.numel(),
        lambda: gated.forward(False, both[:, :12288], both[:, 12288:]),
        lambda: F.silu(both[:, :12288]) * both[:, 12288:],
    )
    q, table = randn(8192, HEADS, SIZE), randn(8192, SIZE, dtype=torch.float32)
    add(
        "rotary 8192x32x128",
        4 * q.numel() + 8 * table.numel(),
        lambda: rotary.rotate(q, table, table),
    )
    logits = randn(4096, VOCABULARY, dtype=torch.float32)
    targets, t = (
        torch.randint(0, VOCABULARY, (4096,), device="cuda"),
        torch.ones(4096, device="cuda"),
    )
    add(
        "logprob 4096x151936",
        4 * logits.numel(),
        lambda: logprob.forward(logits, targets, t),
        lambda: torch.log_softmax(logits, -1),
    )
    _, peak, log_sum = logprob.forward(logits, targets, t)
    out = torch.empty(4096, VOCABULARY, device="cuda", dtype=BF16)
    add(
        "logprob backward 4096x151936",
        6 * logits.numel(),
        lambda: logprob.d_logits(logits, targets, t, peak, log_sum, t, out),
    )
    return rows


def embedding_backward(_: float) -> list[Row]:
    rows = []
    for tokens in (32768, 131072):
        ids, dy = torch.randint(0, VOCABULARY, (tokens,), device="cuda"), randn(tokens, 2048)
        skewed = (torch.rand(tokens, device="cuda") ** 6 * VOCABULARY).long()
        for name, each in (("uniform", ids), ("skewed", skewed)):
            ours = eager_median(
                lambda each=each, dy=dy: embedding.grad_weight(dy, each, VOCABULARY, out_dtype=BF16)
            )
            torch.use_deterministic_algorithms(True)
            stock = eager_median(
                lambda each=each, dy=dy: torch.ops.aten.embedding_dense_backward(
                    dy, each, VOCABULARY, -1, False
                )
            )
            torch.use_deterministic_algorithms(False)
            rows.append({"tokens": tokens, "ids": name, "ours_ms": ours, "torch_ms": stock})
    return rows
