"""DeepSeek-V4's operators in plain torch: one file per operator, written for reading.

They are the arbiters in every test and the bodies of vLLM's CPU operators. Each keeps the published
storage types between operators and computes in fp32; none loops over tokens, sequences or heads.
Notation in the docstrings: T tokens, H hidden size, h heads, D = 512 head size, hc hyper-connection
streams, E experts, k experts per token.
"""
