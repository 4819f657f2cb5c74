"""RMSNorm of contract rmsnorm.lanes16.float32.cpu.v1 in plain C++: 16 lanes, then the tree."""

# ruff: noqa: F821
# pyright: basic, reportUndefinedVariable=false
import torch

CPP = r"""
#include <cmath>
#include <cstdint>

static inline float tree(float *lanes) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

static inline float dot(const float *a, const float *b, int64_t width) {
    float lanes[16] = {0};
    int64_t c = 0;
    for (; c + 16 <= width; c += 16)
        for (int i = 0; i < 16; ++i) lanes[i] = std::fma(a[c + i], b[c + i], lanes[i]);
    for (int i = 0; c + i < width; ++i) lanes[i] = std::fma(a[c + i], b[c + i], lanes[i]);
    return tree(lanes);
}

static inline float inverse(const float *s, int64_t width, float eps) {
    return 1.0f / std::sqrt(dot(s, s, width) / (float)width + eps);
}

extern "C" void norm(const float *x, const float *residual, const float *weight, float *y,
                     float *s, int64_t rows, int64_t width, double eps, int64_t offset) {
    for (int64_t t = 0; t < rows; ++t) {
        const float *in = x + t * width;
        if (residual) {
            for (int64_t c = 0; c < width; ++c)
                s[t * width + c] = in[c] + residual[t * width + c];
            in = s + t * width;
        }
        float r = inverse(in, width, (float)eps);
        for (int64_t c = 0; c < width; ++c)
            y[t * width + c] = (in[c] * r) * (offset ? 1.0f + weight[c] : weight[c]);
    }
}

extern "C" void norm_grad(const float *dy, const float *s, const float *weight, const float *ds,
                          float *dx, float *dw, float *g, int64_t rows, int64_t width, double eps,
                          int64_t offset) {
    for (int64_t t = 0; t < rows; ++t) {
        const float *in = s + t * width, *up = dy + t * width;
        for (int64_t c = 0; c < width; ++c) g[c] = up[c] * ((float)offset + weight[c]);
        float r = inverse(in, width, (float)eps);
        float shift = dot(g, in, width) * r * r / (float)width;
        for (int64_t c = 0; c < width; ++c) {
            float value = r * std::fma(-in[c], shift, g[c]);
            dx[t * width + c] = ds ? ds[t * width + c] + value : value;
            dw[c] = std::fma(up[c], in[c] * r, dw[c]);
        }
    }
}
"""


def forward(x, weight, eps, unit_offset=False, residual=None):
    """y, or (y, s) with a residual; x [T, H] fp32."""
    y = torch.empty_like(x)
    s = None if residual is None else torch.empty_like(x)
    native("norm", x, residual, weight, y, s, x.shape[0], x.shape[1], eps, unit_offset)
    return y if s is None else (y, s)


def backward(dy, s, weight, eps, unit_offset=False, ds=None, initial=None):
    """(dx [T, H], dw [H]), the chains of dw continuing from initial."""
    dx, scratch = torch.empty_like(s), torch.empty_like(weight)
    dw = torch.zeros_like(weight) if initial is None else initial.clone()
    native(
        "norm_grad", dy, s, weight, ds, dx, dw, scratch, s.shape[0], s.shape[1], eps, unit_offset
    )
    return dx, dw
