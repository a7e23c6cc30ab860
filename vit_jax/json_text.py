"""Text of JSON for other programs, which may not accept what Python's own writer adds to JSON."""

import json
import math
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON. A number that JSON cannot state, an infinity or NaN, becomes null."""
    return json.dumps(_statable(value), indent=indent, allow_nan=False)


def _statable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _statable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_statable(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
