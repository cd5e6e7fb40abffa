"""The file of a model's weights, and how a tensor in it gets another name."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import ConfigError, nearest

WEIGHTS = "model.safetensors"


def rename(path: Path, old: str, new: str) -> None:
    """Rename a tensor in the header of a safetensors file; all else stays to the byte.

    Raises:
        ConfigError: it has no such tensor, or the new name is in the way.
    """
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    raw, names = content[8 : 8 + size].rstrip(b" "), json.loads(content[8 : 8 + size])
    if old not in names:
        raise ConfigError(f"{path.name} has no tensor {old!r}{nearest(old, names)}")
    if new in names:
        raise ConfigError(f"{path.name} has a tensor {new!r} already.")
    raw = raw.replace(json.dumps(old).encode(), json.dumps(new).encode())
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])
