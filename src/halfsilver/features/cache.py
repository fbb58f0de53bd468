"""`Cached`: features on disk, so that they are computed once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from halfsilver._core import system
from halfsilver._core.tensors import Batch, batch_leaves, batch_rows
from halfsilver.errors import require
from halfsilver.features.base import FeatureMap

_log = logging.getLogger("halfsilver")

WARNING = (
    "The files in this folder hold features of data records, in the clear. Features of private records are as private "
    "as the records: keep this folder where the private data lie, under the same protection, publish none of it, and "
    "delete it with the data."
)
_NOTE = "PRIVATE.txt"


@dataclass(frozen=True, kw_only=True, eq=False)
class Cached:
    """A feature map that keeps what it computed in a folder.

    Warning: features of private records are private, and the files are not encrypted. Put the folder next to the
    private data, under the same protection. It is made readable for its owner only, and a file in it says so.

    A file is named by a SHA-256 digest of the map's settings and tensors and of the bytes of the rows. Another map,
    other rows or another order of rows therefore have another file. The digest does not show the rows, but whoever has
    the same rows and the same map can see that they are cached.

    Args:
        map: The map, already fitted. Its views must be functions with a name, because lambdas cannot be told apart.
        folder: Where the files are. It is made if needed.
        dtype: The floating-point type in the files. Default ``torch.float32``. ``torch.float16`` halves them.

    Raises:
        ConfigError: If a view of the map is a lambda.

    Example:
        >>> import tempfile, torch
        >>> from halfsilver.features import Frozen
        >>> map = Frozen(torch.nn.Linear(3, 2)).fit()
        >>> cached = Cached(map=map, folder=tempfile.mkdtemp() + "/features")
        >>> x = torch.randn(5, 3)
        >>> torch.equal(cached.transform(x), cached.transform(x))
        True
    """

    map: FeatureMap
    folder: str | Path
    dtype: torch.dtype = torch.float32
    _map_key: str = field(init=False, default="")

    def __post_init__(self) -> None:
        about = json.dumps(dict(self.map.about()), sort_keys=True, default=str)
        require("<lambda>" not in about, "views", "<lambda>", "to be functions with a name", "Define them by def.")
        digest = hashlib.sha256(about.encode())
        for name, tensor in sorted(self.map.state().items()):
            digest.update(name.encode())
            _add(digest, tensor)
        object.__setattr__(self, "_map_key", digest.hexdigest())

    def transform(self, x: Batch) -> Tensor:
        """Return the features of rows, from the folder if they are there.

        Args:
            x: Rows, as for the map.

        Returns:
            The features in float32, rounded to `dtype`.
        """
        path = Path(self.folder) / f"{self._key(x)}.safetensors"
        kept = _read(path, batch_rows(x))
        if kept is None:
            kept = self.map.transform(x).to(self.dtype).contiguous().cpu()
            self._make_folder()
            system.write_atomically(path, save({"features": kept}, metadata={"warning": WARNING}))
        return kept.float()

    def state(self) -> Mapping[str, Tensor]:
        return self.map.state()

    def about(self) -> Mapping[str, Any]:
        return self.map.about()

    def _key(self, x: Batch) -> str:
        digest = hashlib.sha256(f"{self._map_key} {self.dtype}".encode())
        for leaf in batch_leaves(x):
            _add(digest, leaf)
        return digest.hexdigest()

    def _make_folder(self) -> None:
        folder = Path(self.folder).resolve()
        if not (folder / _NOTE).exists():
            system.make_folder(folder)
            folder.chmod(0o700)
            (folder / _NOTE).write_text(WARNING + "\n", encoding="utf-8")
            _log.warning("Features are cached in %s. %s", folder, WARNING)


def _add(digest: Any, tensor: Tensor) -> None:
    """The same for equal tensors, however they lie in memory."""
    digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _read(path: Path, rows: int) -> Tensor | None:
    """What is in the file; None if there is none that can be used, which is then written again."""
    try:
        kept = load_file(path)["features"] if path.exists() else None
    except (SafetensorError, KeyError, OSError):
        return None
    return kept if kept is not None and len(kept) == rows else None
