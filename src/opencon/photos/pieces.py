"""A source of photos in pieces that can be read apart: files of a folder or a table, WebDataset tars, Parquet.

Addresses with :// (s3://bucket/photos) are read through fsspec, an extra. A piece yields every photo as its name, its label
and the bytes of its file; nothing is decoded here.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from opencon.data.listings import IMAGE_SUFFIXES, OTHER_SUFFIXES, printable
from opencon.data.tables import LABEL_COLUMNS, PATH_COLUMNS, read_table
from opencon.errors import DataError, MissingExtraError, OpenConError
from opencon.photos.listing import folder_images

Kind = Literal["files", "tar", "parquet"]
TABLES = (".csv", ".tsv", ".jsonl")
IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "img", "bytes", "content")  # of Parquet files, in this order
NAME_COLUMNS = ("path", "file", "filename", "name", "__key__", "id")
LONGEST = 1 << 30  # bytes of one photo in an archive, ours: more is no photo


@dataclass(frozen=True)
class Photo:
    """One photo of a piece."""

    name: str
    label: str = ""  # empty: none
    content: bytes | None = None  # of its file, where it has been read
    where: str = ""  # its address, where not
    error: str = ""  # why it cannot be read

    def read(self) -> tuple[bytes, str]:
        """The bytes of its file, or why they cannot be read. Several threads may read at once."""
        if self.content is not None or self.error:
            return self.content or b"", self.error
        try:
            with _opened(self.where) as file:
                return file.read(LONGEST), ""
        except Exception as err:  # remote stores raise errors of their own kinds
            return b"", f"cannot be read ({type(err).__name__}: {err})"


@dataclass(frozen=True)
class Piece:
    """Photos that are read together: some files, one tar, or one group of rows of a Parquet file."""

    kind: Kind
    place: str  # an address; for files: the folder that names start from
    names: tuple[str, ...] = ()  # of files
    labels: tuple[str, ...] = ()  # of files, or none
    group: int = 0  # of rows in a Parquet file

    def plain(self) -> list[Any]:
        """For JSON."""
        return [self.kind, self.place, self.names, self.labels, self.group]

    @classmethod
    def of(cls, plain: list[Any]) -> Piece:
        """What `plain` gave; a ValueError or TypeError where it is something else."""
        kind, place, names, labels, group = plain
        if (
            kind not in get_args(Kind)
            or {type(text) for text in (place, *names, *labels)} != {str}
            or type(group) is not int
        ):
            raise ValueError("it names no photos")
        return cls(kind, place, tuple(names), tuple(labels), group)

    def photos(self) -> Iterator[Photo]:
        """Every photo of the piece, in order."""
        if self.kind == "files":
            labels = self.labels or ("",) * len(self.names)
            wheres = (name if "://" in name else os.path.join(self.place, name) for name in self.names)
            return (Photo(n, label, where=w) for n, label, w in zip(self.names, labels, wheres, strict=True))
        return _from_tar(self.place) if self.kind == "tar" else _from_parquet(self.place, self.group)


def pieces_of(source: str, size: int) -> list[Piece]:
    """The pieces of a source.

    Args:
        source: a folder of photos, of .tar or of .parquet files; one such file; or a table path[,label].
        size: photos in a piece of files.
    """
    is_remote = "://" in source
    if not is_remote and Path(source).suffix.lower() in TABLES:
        table = Path(source).expanduser()
        rows = read_table(table, {"path": PATH_COLUMNS, "label": LABEL_COLUMNS}, optional=("label",))
        names, labels = [row["path"] for _, row in rows], [row["label"] for _, row in rows]
        return _cut(str(table.parent), names, labels, size)
    files = _remote_files(source) if is_remote else _local_files(Path(source).expanduser())
    tars, tables = ([f for f in files if f.endswith(end)] for end in (".tar", ".parquet"))
    if tars:
        return [Piece("tar", file) for file in tars]
    if tables:
        return [Piece("parquet", file, group=i) for file in tables for i in range(_num_groups(file))]
    if not is_remote:
        root = Path(source).expanduser()
        names = [os.fsdecode(os.path.relpath(path, root)) for path in folder_images(root)]
        return _cut(str(root), names, [], size)
    names = [file for file in files if Path(file).suffix.lower() in IMAGE_SUFFIXES | OTHER_SUFFIXES]
    if not names:
        raise DataError(f"there is no photo, .tar or .parquet at {source}.")
    return _cut("", names, [], size)


def _cut(place: str, names: list[str], labels: list[str], size: int) -> list[Piece]:
    parts = range(0, len(names), size)
    return [Piece("files", place, tuple(names[i : i + size]), tuple(labels[i : i + size])) for i in parts]


def _local_files(path: Path) -> list[str]:
    """The archives in a folder, or the path itself."""
    if not path.exists():
        raise DataError(f"{printable(path)} does not exist. Give a folder, a table, .tar or .parquet files.")
    if path.is_dir():
        return sorted(str(file) for ending in ("tar", "parquet") for file in path.glob(f"*.{ending}"))
    if path.suffix not in (".tar", ".parquet"):
        raise DataError(f"{printable(path)} is no folder, table, .tar or .parquet file.")
    return [str(path)]


def _remote_files(source: str) -> list[str]:
    try:
        fs, path = _fsspec().core.url_to_fs(source)
        found = [path] if fs.isfile(path) else sorted(fs.find(path))
        return [fs.unstrip_protocol(file) for file in found]
    except OpenConError:
        raise
    except ImportError as err:
        kind = source.partition("://")[0]
        raise DataError(
            f"addresses with {kind}:// need a package of their own, which is not installed ({err})."
        ) from err
    except Exception as err:  # remote stores raise errors of their own kinds
        raise DataError(f"cannot look into {source} ({type(err).__name__}: {err}).") from err


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError as err:
        raise MissingExtraError("fsspec", "shards", "an address with ://", err) from err
    return fsspec


def _opened(place: str) -> Any:
    """A local or remote file, to read from anywhere in it. A pipe is refused: it would wait forever."""
    if "://" in place:
        return _fsspec().open(place, "rb").open()
    if not os.path.isfile(place):
        raise FileNotFoundError("not a file")
    return open(place, "rb")


def _from_tar(place: str) -> Iterator[Photo]:
    """The images of a tar; the label of x.jpg is the text of x.cls, where there is one right before or after it."""
    waiting: Photo | None = None
    label: tuple[str, str] = ("", "")  # key and text of the last .cls
    try:
        with _opened(place) as file, tarfile.open(fileobj=file, mode="r|*") as tar:
            for member in tar:
                key, ending = os.path.splitext(member.name)
                if not member.isreg() or os.path.basename(key).startswith("."):
                    continue
                if ending == ".cls":
                    label = (key, _read(tar, member).decode("utf-8", "replace").strip())
                    if waiting is not None and os.path.splitext(waiting.name)[0] == key:
                        waiting = Photo(waiting.name, label[1], waiting.content)
                elif ending.lower() in IMAGE_SUFFIXES | OTHER_SUFFIXES:
                    if waiting is not None:
                        yield waiting
                    waiting = Photo(member.name, label[1] if label[0] == key else "", _read(tar, member))
    except (OSError, tarfile.TarError, EOFError) as err:
        if waiting is not None:
            yield waiting
            waiting = None
        yield Photo(os.path.basename(place), error=f"cannot be read to its end ({type(err).__name__}: {err})")
    if waiting is not None:
        yield waiting


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    return file.read(LONGEST) if file is not None else b""


@contextlib.contextmanager
def _parquet(place: str) -> Iterator[Any]:
    """A Parquet file, of which only what is asked for is read, remote or not."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise MissingExtraError("pyarrow", "shards", "a Parquet file", err) from err
    with _opened(place) as file:
        yield parquet.ParquetFile(file)


def _num_groups(place: str) -> int:
    try:
        with _parquet(place) as file:
            number, columns = int(file.num_row_groups), file.schema_arrow.names
    except OpenConError:
        raise
    except Exception as err:  # pyarrow raises errors of its own kinds
        raise DataError(f"{place} cannot be read as Parquet ({_line(err)}).") from err
    if _first(IMAGE_COLUMNS, columns) is None:
        raise DataError(f"{place} has no column of images ({', '.join(IMAGE_COLUMNS)}) among {', '.join(columns)}.")
    return number


def _line(err: Exception) -> str:
    return " ".join(str(err).split())


def _from_parquet(place: str, group: int) -> Iterator[Photo]:
    """Rows with the bytes of an image: a binary column, or {bytes, path} as Hugging Face's data sets have."""
    try:
        with _parquet(place) as file:
            columns = file.schema_arrow.names
            wanted = [_first(names, columns) for names in (IMAGE_COLUMNS, NAME_COLUMNS, LABEL_COLUMNS)]
            table = file.read_row_group(group, columns=[column for column in wanted if column is not None])
            rows = table.to_pylist()
    except OpenConError:
        raise
    except Exception as err:  # pyarrow raises errors of its own kinds
        called = f"{os.path.basename(place)}#{group}"
        yield Photo(called, error=f"cannot be read ({type(err).__name__}: {_line(err)})")
        return
    image, name, label = wanted
    for i, row in enumerate(rows):
        cell = row[image]
        content, inner = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        called = str(row[name]) if name else inner or f"{os.path.basename(place)}#{group}.{i}"
        error = "" if isinstance(content, bytes) else "has no bytes in its row"
        text = "" if label is None or row[label] is None else str(row[label])
        yield Photo(called, text, content if isinstance(content, bytes) else None, error=error)


def _first(wanted: Iterable[str], there: Iterable[str]) -> str | None:
    have = set(there)
    return next((name for name in wanted if name in have), None)
