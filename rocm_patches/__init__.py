"""What vLLM loads: DeepSeek-V4 for AMD gfx942, and for machines without a GPU.

`rocm_patches.plugin` is vLLM's entry point. `reference/` holds one plain torch file per operator, the
arbiter of every kernel; `fp8` is the only place that knows number formats; `cpu/` puts the references
behind vLLM's CPU operators. Importing this package imports neither torch nor vLLM.
"""

__version__ = "0.1.0"
