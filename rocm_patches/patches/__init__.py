"""The catalogue: every patch that this bundle knows, in the order of application. One file per patched vLLM
module, named like it. A file here imports nothing but the standard library and `rocm_patches.registry` at
module level; what needs torch, triton or vLLM is imported inside the replacements.

A new patch: write it, add its file to PATCHES, run `make fingerprints` and `make docs`.
"""

from __future__ import annotations

from rocm_patches.patches import rocm_aiter_mla_sparse
from rocm_patches.registry import Patch

PATCHES: tuple[Patch, ...] = (*rocm_aiter_mla_sparse.PATCHES,)
