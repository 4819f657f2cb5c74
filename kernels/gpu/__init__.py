"""What the GPU operators share: device facts, pinned cuBLASLt, written-out sum trees, digest taps.

Nothing here imports triton when this package is imported; each operator's ``gpu.py`` does so at its
first launch, so that contracts can be listed on a machine without a GPU.
"""
