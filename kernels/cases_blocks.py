"""What an open chunk's page holds for recurrences on matrix units, made without their programs."""

import torch
from torch import Tensor


def solve(k: Tensor, g: Tensor, beta: Tensor, end: Tensor) -> None:
    """T of an open chunk, written in the dtype of k where its end state will be.

    k ``[C, HK, K]``, g ``[C, HV]`` or ``[C, HV, K]`` running sums, beta ``[HV, rows]`` of the rows
    there are; end ``[HV, K, V]`` takes ``[HV, C, C]`` numbers at its head.
    """
    (chunk, heads), rows = g.shape[:2], beta.shape[1]
    keys = k[:rows].float().repeat_interleave(heads // k.shape[1], 1).transpose(0, 1)
    sums = g[:rows].transpose(0, 1)
    e = (sums[:, :, None] - sums[:, None]).clamp(max=0).exp()
    if e.dim() == 3:
        b = keys @ keys.transpose(1, 2) * e
    else:
        b = torch.einsum("hid,hjd,hijd->hij", keys, keys, e)
    one = torch.eye(rows, device=b.device) + beta[:, :, None] * b.tril(-1)
    t = torch.linalg.solve_triangular(one, torch.diag_embed(beta), upper=False)
    space = end.view(k.dtype).flatten(1)[:, : chunk * chunk].unflatten(1, (chunk, chunk))
    space[:, :rows] = 0.0
    space[:, :rows, :rows] = t.to(k.dtype)
