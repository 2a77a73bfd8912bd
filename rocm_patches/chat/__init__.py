"""Chat with DeepSeek-V4 around the model: the arguments of its tool calls, the parser that reads calls out of its
output, and the end of its prompt. `rocm_patches.patches` puts these in vLLM's place; nothing here runs on a GPU.
"""
