"""The one place where something that is not public is used, and why."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.lax import lax as _lax


def as_weak(array: Any) -> Any:
    """The array with a weak type. No public function makes a weakly typed array of given values and sharding."""
    return jax.jit(lambda x: _lax._convert_element_type(x, x.dtype, weak_type=True))(array)
