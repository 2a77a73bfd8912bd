"""DeepSeek-V4's operators as Triton kernels for gfx942: one file per operator, next to its reference of the same name.

Each file holds the kernel, the launcher that picks its tile, and what is prepared once from the weights. One text
serves three machines: gfx942 (native FNUZ conversions), an NVIDIA GPU (the same bytes through OCP conversions) and
Triton's interpreter. Importing this package imports nothing; its modules import triton.
"""
