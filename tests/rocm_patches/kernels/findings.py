"""What the tests of this folder share: the interpreter's device, and the check of a selftest's findings."""

from __future__ import annotations

import torch

from rocm_patches.kernels.selftest import Finding

CPU = torch.device("cpu")


def check(found: list[Finding]) -> None:
    """Every finding within its limit; and there are some."""
    assert found
    bad = [f for f in found if not f.ok]
    assert not bad, "\n".join(map(str, bad))
