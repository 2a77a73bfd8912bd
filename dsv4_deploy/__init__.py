"""The control side of dsv4-deploy: plans, starts, checks and stops DeepSeek-V4 on vLLM.

Nothing here imports torch, triton, transformers or vllm when it is imported: the CLI also runs where none of
them is installed.
"""

__version__ = "0.1.0"
