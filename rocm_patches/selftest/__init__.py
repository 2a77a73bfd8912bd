"""Is this machine's arithmetic right? Runs the references, the kernels and the patched operators against float64 on
small and on real shapes, in less than a minute. `dsv4-deploy selftest` starts it, and so does `up` on AMD GPUs before
it serves.
"""
