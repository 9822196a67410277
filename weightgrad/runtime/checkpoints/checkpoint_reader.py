"""Reads a site's checkpoint as if a stranger had written it.

torch.distributed.checkpoint keeps what is where in a pickle, and unpickling runs whatever code the pickle names. Who
can put a file into a directory of checkpoints, or hand over a copy of one, would run code at the site. So the pickle is
read with those few classes that such a file is made of; everything in it is a tensor, and lies in the checkpoint.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        (_METADATA, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
            *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of a checkpoint's metadata, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        constant = getattr(torch, name, None) if module == "torch" else None
        if isinstance(constant, torch.dtype | torch.layout | torch.memory_format) or constant is torch.Size:
            return constant
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def parse_metadata(file: IO[bytes]) -> Metadata:
    """The metadata of a checkpoint.

    Raises:
        pickle.UnpicklingError: It names code, has something else than tensors, or files outside the checkpoint.
    """
    found = _Unpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}, and no metadata")
    for name, about in found.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is no tensor")
    for place in (found.storage_data or {}).values():
        if Path(place.relative_path).name != str(place.relative_path) or place.transform_descriptors:
            raise pickle.UnpicklingError(f"values are in {place.relative_path}, which is no file of the checkpoint")
    return found


class CheckpointReader(FileSystemReader):
    """A reader of torch.distributed.checkpoint that runs no code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `FileSystemReader.read_metadata`."""
        del args, kwargs
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = parse_metadata(file)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
