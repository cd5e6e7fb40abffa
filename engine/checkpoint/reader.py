"""Lazy reading of the tensors of a model folder: one safetensors file, or an index and its shards.

Opening reads headers only; a tensor's bytes are read when it is asked for. Headers are bounded
before anything is allocated for them. Refuses a folder whose index and shards disagree in any name,
in either direction, and any safetensors file that the index does not use.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.files import member, model_folder, plain_name, read_json
from engine.errors import CheckpointError

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 * 10**6
"""The bound of the safetensors format itself."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The names of number formats in a safetensors header."""


class CheckpointReader:
    """The tensors of one model folder by the names its files give them.

    Not safe for use by several threads at once. Close it, or use it in a `with` statement.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open every shard of `folder` and check that they fit together.

        Raises:
            CheckpointError: there are no tensors, a shard is missing or damaged, the index is
                stale, or a safetensors file is left over.
        """
        self.folder = model_folder(folder)
        self._files: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        """Return all tensor names, shard by shard."""
        return tuple(self._shard_of)

    def path_of(self, name: str) -> Path:
        """Return the file that holds the tensor `name`."""
        return self.folder / self._shard(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` from its header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format of the tensor `name` from its header.

        Raises:
            CheckpointError: torch has no such format.
        """
        dtype = self._slice(name).get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path_of(name)}: tensor {name} has the number format {dtype}, "
                f"which is none of {', '.join(DTYPES)}."
            )
        return DTYPES[dtype]

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor `name`, in the number format and shape of the file.

        It may share the file's mapping: its bytes are read when they are used, so copy it before
        the file changes.
        """
        path = self.path_of(name)
        try:
            tensor: torch.Tensor = self._open_file(name).get_tensor(name)
        except (SafetensorError, OSError) as failed:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({failed}).") from None
        return tensor

    def close(self) -> None:
        """Let go of the files; a second call does nothing."""
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> None:
        present = sorted(path.name for path in self.folder.glob("*.safetensors"))
        index = self.folder / INDEX
        if index.exists() or index.is_symlink():
            self._open_sharded(present)
        elif len(present) == 1:
            self._shard_of = dict.fromkeys(self._open_shard(present[0]), present[0])
        elif present:
            raise CheckpointError(
                f"{index}: the index is missing although there are {len(present)} safetensors "
                "files; copy it too, or keep one file."
            )
        else:
            raise CheckpointError(
                f"{self.folder}: there is no safetensors file; name a folder with "
                f"model.safetensors, or {INDEX} and its shards."
            )

    def _open_sharded(self, present: list[str]) -> None:
        listed = _weight_map(self.folder)
        shards = sorted(set(listed.values()))
        for left_over in sorted(set(present) - set(shards)):
            raise CheckpointError(
                f"{self.folder / left_over}: this file is not in {INDEX}; remove it, or restore "
                "the index that belongs to it."
            )
        for shard in shards:
            held = self._open_shard(shard)
            wanted = {name for name, where in listed.items() if where == shard}
            for name in sorted(wanted.symmetric_difference(held)):
                fact = (
                    f"lacks the tensor {name} that {INDEX} places there"
                    if name in wanted
                    else f"holds the tensor {name} that {INDEX} does not place there"
                )
                raise CheckpointError(
                    f"{self.folder / shard}: {fact}; the index is stale, restore the one saved "
                    "with these shards."
                )
            self._shard_of.update(dict.fromkeys(held, shard))

    def _open_shard(self, shard: str) -> list[str]:
        """Open one file and return the names in it."""
        path = member(self.folder, shard)
        check_header_length(path)
        try:
            file: Any = safe_open(str(path), framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError, RuntimeError) as wrong:
            reason = " ".join(str(wrong).split())
            raise CheckpointError(
                f"{path}: the safetensors file cannot be opened, it may be damaged ({reason}); "
                "copy it again."
            ) from None
        self._files[shard] = file
        return list(file.keys())

    def _shard(self, name: str) -> str:
        if name not in self._shard_of:
            raise CheckpointError(f"{self.folder}: there is no tensor {name} in these files.")
        return self._shard_of[name]

    def _open_file(self, name: str) -> Any:
        shard = self._shard(name)
        assert shard in self._files, "the reader is closed"
        return self._files[shard]

    def _slice(self, name: str) -> Any:
        return self._open_file(name).get_slice(name)


def check_header_length(path: Path) -> None:
    """Refuse a file whose first eight bytes promise a header that cannot be.

    Example: 100 bytes that begin with the little-endian number 2**40 would ask for a terabyte.

    Raises:
        CheckpointError: the file is shorter than its header says, or the header exceeds the format.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if size < LENGTH_BYTES or LENGTH_BYTES + length > size or length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: {size} bytes cannot hold the header of {length} bytes that it announces; "
            "the file is cut short or not safetensors, copy it again."
        )


def _weight_map(folder: Path) -> dict[str, str]:
    path = member(folder, INDEX)
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: 'weight_map' must be an object of tensor name: file name.")
    return {name: plain_name(folder, shard) for name, shard in listed.items()}
