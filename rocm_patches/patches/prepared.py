"""What is made of a weight once, kept beside it until the weight changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PREFIX = "_dsv4_prepared_"


def prepared(weight: Any, what: str, make: Callable[[], Any]) -> Any:
    """`make()`, kept on the tensor `weight` under the name `what`; made again for other memory or after a change.

    torch counts no change through `weight.data`, and none of a tensor that was made in inference mode: whoever loads
    weights that way has to `forget` what was made of the old ones.
    """
    name = _PREFIX + what
    state = weight.data_ptr(), None if weight.is_inference() else weight._version
    kept = getattr(weight, name, None)
    if kept is None or kept[0] != state:
        kept = state, make()
        setattr(weight, name, kept)
    return kept[1]


def forget(weight: Any) -> None:
    """Drop all that was made of a weight."""
    for name in [name for name in vars(weight) if name.startswith(_PREFIX)]:
        delattr(weight, name)
