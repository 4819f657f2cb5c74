"""Importance sampling with stock kernels: c = w, as REINFORCE Zero, on engines that disagree.

For study only. Not another formula: the name tells a run apart whose plan is `stock`, where w holds
the kernel mismatch beside the weight lag. Source: the comparison in Hu et al. 2026.
"""

from .reinforce_zero import unclipped
from .tokens import CoefficientLoss

loss = CoefficientLoss(name="stock_kernels", coefficient=unclipped)
