"""`PrivateData`: the opaque handle that carries private records through code outside this folder.

The handle has no length, no index and no iterator, and its repr shows nothing. Only `halfsilver.privacy` opens it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, NoReturn, final

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset, TensorDataset

from halfsilver._core.given import as_data
from halfsilver._core.tensors import Batch, batch_rows, take_rows
from halfsilver.errors import PrivateDataError, require
from halfsilver.privacy.columns import numbers
from halfsilver.privacy.mapped import MappedRecords, Transform
from halfsilver.privacy.read_ahead import ReadAhead
from halfsilver.privacy.recognise import shares_rows
from halfsilver.privacy.records import Indices, Records
from halfsilver.privacy.schema import Schema, plain, require_plain
from halfsilver.privacy.silence import silent

Keys = Sequence[Any] | Tensor | np.ndarray[Any, Any]


@final
class PrivateData:
    """An opaque handle on private records, which you pass to `Trainer.fit`.

    Guarantee: code outside `halfsilver.privacy` cannot read a record, count the records or iterate over them through
    this handle. An unusable record contributes zero silently, as a NaN record does, because an error would reveal that
    it exists. A record is unusable if reading it raises anything but `KeyboardInterrupt`, if its shapes differ from
    those of the example, or if it is not made of dense real numbers. Use `inspect_not_private` to find such records.

    Args:
        records: The private records. Either a tensor, NumPy array or pandas frame, or a tuple or dict of them, with one
            example per entry of dimension 0; or a map-style data set with ``__len__`` and ``__getitem__``, such as a
            list. Of a `DataLoader` the data set is taken, because halfsilver draws the batches. Floating-point arrays
            and frames get torch's default dtype.
        users: One key per record that names the person behind it, as a sequence, a NumPy array or a tensor of one
            dimension. Default None. Plans with ``unit="user"`` need keys, and plans with ``unit="example"`` refuse
            them. Keys are compared by value, so two spellings of one name count as two people.
        example: One made-up record that shows the structure, shapes and dtypes. Default None, which takes them from the
            tensors or from the public data. Give it for a data set that is not made of tensors when there is no public
            data.
        workers: How many processes read records of a data set while the model computes, at least 0. Default 0, which
            reads them in the process that trains. The processes are forked when training starts. Tensors are in
            memory, and are not read by others.

    Raises:
        ConfigError: If `workers` is no number from 0 on.
        PrivateDataError: If `records` is an IterableDataset, if the columns are not tensors of equal
            length, or if a key is missing or cannot be compared by value.

    Example:
        >>> import torch
        >>> PrivateData((torch.randn(100, 3), torch.randint(2, (100,))))
        PrivateData(<opaque>)
    """

    __slots__ = ("__example", "__given", "__records", "__users")

    def __init__(
        self,
        records: Any,
        *,
        users: Keys | None = None,
        example: Any = None,
        workers: int = 0,
    ) -> None:
        if isinstance(records, PrivateData):
            raise PrivateDataError("This is a PrivateData handle already; pass it on as it is.")
        require(type(workers) is int and workers >= 0, "workers", workers, "to be a whole number, at least 0")
        self.__records, self.__given = _as_records(records, workers), records
        self.__users = None if users is None else _Users.from_keys(users)
        if users is not None and len(users) != self.__records.size():
            raise PrivateDataError("Expected one user key for each private record.")
        self.__example = example

    @classmethod
    def of(cls, records: Records) -> PrivateData:
        """Make a handle on records that the library reads in its own way; not for users.

        Args:
            records: An object with the methods of `Records` in ``halfsilver.privacy.records``.

        Returns:
            A handle that behaves as any other.
        """
        handle = cls(())
        handle.__records, handle.__given = records, records
        return handle

    def __repr__(self) -> str:
        return "PrivateData(<opaque>)"

    def __reduce__(self) -> NoReturn:
        raise PrivateDataError("Private data cannot be pickled; open it where it lies.")

    def shares_rows_with(self, data: Any) -> bool:
        """Tell whether a data set that should be public holds some of these private rows.

        The check compares memory addresses and object identities. It finds views, slices and subsets of the same
        storage. It does not find copies; `halfsilver.overlap` does.

        Args:
            data: The data set in question, of any kind that `PrivateData` takes.

        Returns:
            True if both share at least one row in memory.
        """
        return data is self or shares_rows(self.__given, data)

    def close(self) -> None:
        """End the processes that read records, if there are any. A later read starts new ones.

        `Trainer` does so at the end of `fit`.

        Example:
            >>> PrivateData([torch.zeros(3)], workers=2).close()
        """
        if isinstance(self.__records, ReadAhead):
            self.__records.close()

    def mapped(self, transform: Transform, *, column: int | str = 0, rows: int = 256) -> PrivateData:
        """Return a handle on features of the records, computed inside the boundary.

        Guarantee: `transform` gets batches of one fixed shape, filled up with made-up rows, and what it returns stays
        behind the handle. If it fails on a record, that record contributes zero silently, and the features of the
        others do not change. Before a record is read, `transform` is tried on made-up rows. It is refused if their
        features change with the rows beside them, and where they change by a bit with their place in the batch, it gets
        fewer rows at once. Nothing else about `transform` can be checked: it must not keep,
        print or send what it is given, and may depend on public rows only. The maps of `halfsilver.features` do so.

        Args:
            transform: A function of a batch of inputs that returns one row of features for each, such as the
                ``transform`` of a fitted feature map.
            column: Which entry of a record is replaced by its features: a number for tuples, a name for dicts. Default
                0, the input of pairs of input and label. Records that are single tensors are replaced as a whole.
            rows: How many records `transform` gets at once, at least 1. From 64 on, it is rounded down to a multiple of
                64. Default 256. Lower it if memory is short.

        Returns:
            A handle on the same records, users included, with features. They are computed when training first reads a
            record, after the ledger's entry for that step, and stay in memory.

        Raises:
            PrivateDataError: If the shapes of a record are unknown, or `transform` returns something else than one row
                of features for each made-up row, or mixes rows.
            ConfigError: If the record has no such column.

        Example:
            >>> import torch
            >>> data = PrivateData((torch.randn(100, 3), torch.randint(2, (100,))))
            >>> data.mapped(lambda x: torch.cat([x, x.square()], 1))
            PrivateData(<opaque>)
        """
        require(rows >= 1, "rows", rows, "at least 1")
        handle = PrivateData.of(MappedRecords(self.__records, self._schema(), transform, column, rows))
        handle.__given, handle.__users = self.__given, self.__users
        return handle

    def _open(self) -> tuple[Records, _Users | None]:
        return self.__records, self.__users

    def _schema(self, public_example: Any = None) -> Schema:
        """Shapes and dtypes from public sources only: no private record may set them for all others."""
        of_tensors, loose = self.__records.schema(), getattr(self.__records, "loose", ())
        like = public_example if self.__example is None else self.__example
        if of_tensors is not None and like is not None and (loose or self.__example is None):
            of_tensors = of_tensors.beside(like, loose)
        if self.__example is not None:
            schema = Schema.of_record(self.__example)
            if of_tensors is not None and of_tensors.shapes != schema.shapes:
                raise PrivateDataError(f"Expected example to have the shapes {of_tensors.shapes}, not {schema.shapes}.")
            return _fitting(schema, self.__records)
        if of_tensors is not None:
            return of_tensors
        if public_example is not None:
            return _fitting(Schema.of_record(public_example), self.__records)
        raise PrivateDataError(
            "The shapes of a private record are not known without reading one. Give a made-up record: "
            "PrivateData(dataset, example=(torch.zeros(1, 28, 28), torch.tensor(0)))."
        )

    def _classes(self) -> dict[str, int]:
        """How many classes a data set of Hugging Face declares, by column: as its names, that belongs to the table."""
        dataset: Any = getattr(self.__records, "dataset", None)
        if type(dataset).__module__ != "datasets.arrow_dataset" or dataset.format["type"] == "custom":
            return {}
        kinds = {name: getattr(feature, "feature", feature) for name, feature in dataset.features.items()}
        return {name: kind.num_classes for name, kind in kinds.items() if type(kind).__name__ == "ClassLabel"}

    def inspect_not_private(self, example: Any, limit: int = 1000) -> dict[str, Any]:
        """Count the unusable records and say why each is unusable, for the custodian of the data.

        This reads records in the clear. Its result is outside the privacy guarantee, so do not publish it.

        Args:
            example: One record of the right structure, shapes and dtypes. It may be made up.
            limit: How many records to read, from the first on; at least 0. Default 1000. Raise it to check the whole
                set.

        Returns:
            A dict with ``not_private`` (always True), ``looked_at`` (the number of records read) and ``unusable`` (the
            number of records per reason).

        Example:
            >>> import torch
            >>> data = PrivateData([torch.zeros(3), torch.zeros(2), torch.zeros(3)])
            >>> data.inspect_not_private(torch.zeros(3))["looked_at"]
            3
        """
        schema = Schema.of_record(example)
        reasons: dict[str, int] = {}
        size = min(limit, self.__records.size())
        for i in range(size):
            problem = self.__records.problem(i, schema)
            if problem:
                reasons[problem] = reasons.get(problem, 0) + 1
        return {"not_private": True, "looked_at": size, "unusable": reasons}


def _fitting(schema: Schema, records: Records) -> Schema:
    """Return the schema, or raise if a Hugging Face table has other columns, because then no row could be used.

    Names, kinds and dimensions of columns belong to the table, as shapes belong to tensors. No row is read.
    """
    form = getattr(getattr(records, "dataset", None), "format", None)
    form = form if isinstance(form, dict) and {"type", "columns", "output_all_columns"} <= form.keys() else None
    if form and form["type"] != "custom" and not form["output_all_columns"]:
        names, wanted = sorted(form["columns"]), schema.columns
        if names != wanted:
            raise PrivateDataError(
                f"The private data set has the columns {names}, but its example, or the public one, has {wanted}. Give "
                "both the same by select_columns."
            )
        kinds = getattr(getattr(records, "dataset", None), "features", None) or {}
        for name, like in zip(names, schema.leaves, strict=True) if len(names) == len(schema.leaves) else ():
            if _dimensions(kinds.get(name)) not in (None, like.dim()):
                raise PrivateDataError(
                    f"Expected the private column {name!r} to hold numbers of {like.dim()} dimensions, as its example, "
                    f"or the public one, does. It is declared as {kinds[name]}."
                )
    return schema


def _dimensions(feature: Any, outside: int = 0) -> int | None:
    """How many dimensions a column of Hugging Face's has; -1 for text and dates, None for what is not known."""
    if type(feature).__name__ in ("List", "LargeList", "Sequence"):
        return _dimensions(feature.feature, outside + 1)
    kind = feature.dtype if type(feature).__name__ in ("Value", "ClassLabel") else ""
    return outside if kind in _NUMBERS else -1 if kind.startswith(_OTHERS) else None


@dataclass(frozen=True)
class _TensorRecords:
    """Columns in memory; which of them were frames, if any."""

    batch: Batch
    loose: tuple[bool, ...] = ()
    fixed_shape: ClassVar[bool] = True

    def size(self) -> int:
        return batch_rows(self.batch)

    def schema(self) -> Schema:
        schema, usual = Schema.of_columns(self.batch), torch.get_default_dtype()
        pairs = zip(schema.leaves, self.loose or repeat(False), strict=False)
        return Schema(tuple(t.to(usual) if f and t.is_floating_point() else t for t, f in pairs), schema.structure)

    def fetch(self, indices: Indices, schema: Schema) -> Batch:
        rows = take_rows(self.batch, indices)
        return schema.cast(rows) if self.loose else rows

    def problem(self, index: int, schema: Schema) -> str:
        if self.loose:
            return "" if batch_rows(self.fetch(torch.tensor([index]), schema)) else "no whole number"
        return "" if self.schema().shapes == schema.shapes else "shape"


@dataclass(frozen=True)
class _DatasetRecords:
    dataset: Any
    fixed_shape: ClassVar[bool] = True

    def size(self) -> int:
        return len(self.dataset)

    def schema(self) -> Schema | None:
        return None

    def fetch(self, indices: Indices, schema: Schema) -> Batch:
        wanted = list(range(indices.start, indices.stop)) if isinstance(indices, slice) else indices.tolist()
        columns = self._columns(wanted)
        if columns is None:
            found = [self._read(i, schema) for i in wanted]
        else:
            with silent():  # one row that differs, and all are looked at one by one
                return schema.conform_all(columns)
            rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
            found = [_conforming(row, schema) for row in rows]
        return schema.stack([record for record in found if record is not None])

    def _read(self, index: int, schema: Schema) -> list[Tensor] | None:
        with silent():  # whatever a record raises depends on private values: the record is left out
            return schema.conform(self._rows[index])
        return None

    @property
    def _rows(self) -> Any:
        """The data set in the form in which all rows come, one by one or together."""
        return self.dataset if self._table is None else self._table

    def _columns(self, wanted: list[int]) -> dict[str, list[Any]] | None:
        """The rows by one read, where the data set is a table of numbers; None where they have to be read one by one.

        Only of such a table is it known that no row changes how another one comes out. Formats that pad or stack could.
        """
        if self._table is None or not wanted:
            return None
        with silent():
            columns: dict[str, list[Any]] = self._table[wanted]
            return columns
        return None

    @cached_property
    def _table(self) -> Any:
        """The data set as a table of Hugging Face that gives numbers as they are, or None. No row is read."""
        if type(self.dataset).__module__ != "datasets.arrow_dataset":  # a class of somebody's own may read otherwise
            return None
        form, kinds = getattr(self.dataset, "format", None), getattr(self.dataset, "features", None)
        if not (isinstance(form, dict) and isinstance(kinds, dict) and form.get("type") in (None, "torch", "numpy")):
            return None
        if form["output_all_columns"] or form["format_kwargs"]:
            return None
        if not all(_is_number(kinds[name]) for name in form["columns"]):
            return None
        return self.dataset.with_format(None, columns=form["columns"])

    def problem(self, index: int, schema: Schema) -> str:
        try:
            schema.conform(self._rows[index])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `silent`
            return f"{type(error).__name__}: {error}"
        return ""


def _conforming(row: Any, schema: Schema) -> list[Tensor] | None:
    with silent():
        return schema.conform(row)
    return None


_NUMBERS = ("bool", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")

_OTHERS = ("string", "large_string", "binary", "large_binary", "date", "time", "duration")


def _is_number(feature: Any) -> bool:
    """Whether a column of Hugging Face's holds numbers, or lists of them."""
    if type(feature).__name__ in ("List", "LargeList", "Sequence"):
        return _is_number(feature.feature)
    return type(feature).__name__ == "Value" and feature.dtype in _NUMBERS


@dataclass(frozen=True)
class _Users:
    """Rows of each user, as one sorted index with offsets."""

    order: Tensor
    offsets: Tensor

    @classmethod
    def from_keys(cls, keys: Keys) -> _Users:
        numbers = _numbered(keys)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(numbers))])
        return cls(torch.from_numpy(np.argsort(numbers, kind="stable")), torch.from_numpy(offsets))

    def size(self) -> int:
        return len(self.offsets) - 1

    def rows(self, user: int, chunk: int) -> Iterator[Tensor]:
        start, stop = int(self.offsets[user]), int(self.offsets[user + 1])
        return (self.order[i : min(i + chunk, stop)] for i in range(start, stop, chunk))


def _numbered(keys: Keys) -> np.ndarray[Any, Any]:
    """0, 1, 2 ... for each distinct key. Python keys are compared as they are: as an array 1 and "1" would merge."""
    column = np.asarray(keys) if isinstance(keys, Tensor) else keys
    if isinstance(column, np.ndarray):
        if column.ndim != 1:
            raise PrivateDataError(f"Expected the keys of users as one column, got {column.ndim} dimensions.")
        if column.dtype.kind in "biufcmMSU" and not isinstance(column, np.ma.MaskedArray):
            text = column.dtype.kind in "SU"
            _require_keys(bool(np.char.str_len(column).all() if text else (column == column).all()))
            return np.unique(column, return_inverse=True)[1]
        column = column.tolist()
    seen: dict[Any, int] = {}
    return np.fromiter((seen.setdefault(_checked(key), len(seen)) for key in column), dtype=np.int64)


def _checked(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_checked, key))
    _require_keys(key is not None and not (isinstance(key, str | bytes) and not key) and _equals_itself(key))
    hashed: Any = type(key).__hash__
    if isinstance(key, Tensor) or hashed is None or hashed is object.__hash__:
        raise PrivateDataError(
            f"Expected keys of users that compare by value, such as text or whole numbers, not {type(key).__name__}: "
            "rows of one person would count as several people's. A column of a tensor can be given as it is."
        )
    return key


def _equals_itself(key: Any) -> bool:
    """NaN and NaT do not; pandas.NA will not say."""
    try:
        return bool(key == key)
    except Exception:
        return False


def _require_keys(found: bool) -> None:
    """Neither the key nor its row is named. Nobody knows whether two rows without a key belong to one person."""
    if not found:
        raise PrivateDataError(
            "Some private rows lack the key of their user (None, NaN, NaT, NA or an empty text). Find out whose they "
            "are, or leave them out: whose contribution they count towards cannot be guessed."
        )


def _as_records(records: Any, workers: int) -> Records:
    found = _records_here(as_data(records, _loose))
    if isinstance(found, _TensorRecords):
        given = pytree.tree_leaves(plain(records))
        loose = tuple(hasattr(part, "iloc") or getattr(part, "dtype", "") == "O" for part in given)
        found = replace(found, loose=loose if any(loose) else ())
    return ReadAhead(found, workers) if workers and isinstance(found, _DatasetRecords) else found


def _loose(array: np.ndarray[Any, Any]) -> Tensor:
    """Whole numbers, or float64: one record with a missing value or a text would change the dtype of all."""
    whole = array.dtype.newbyteorder("=") if array.dtype.kind in "biu" else None
    return torch.from_numpy(array.astype(whole) if whole else numbers(array, "columns").astype(np.float64))


def _records_here(records: Any) -> Records:
    if isinstance(records, IterableDataset):
        raise PrivateDataError(
            "Poisson sampling needs rows by index; an IterableDataset has none. Pass a map-style set."
        )
    if isinstance(records, TensorDataset):
        require_plain(records.tensors)
        return _TensorRecords(records.tensors)
    leaves = pytree.tree_leaves(records) if isinstance(records, Tensor | tuple | dict) else []
    if leaves and all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        require_plain(records)
        if len({len(leaf) for leaf in leaves}) != 1:
            raise PrivateDataError("The tensors of a private data set must have the same number of rows.")
        return _TensorRecords(plain(records))
    if leaves:
        held = sorted({type(leaf).__name__ for leaf in leaves})
        raise PrivateDataError(
            f"Expected the columns of private data as tensors or arrays, with the example on dimension 0; got "
            f"{', '.join(held)}. Turn each into one by torch.as_tensor."
        )
    if not (hasattr(records, "__getitem__") and hasattr(records, "__len__")):
        raise PrivateDataError(f"Expected private data with __len__ and __getitem__, or tensors; got {type(records)}.")
    return _DatasetRecords(records)
