"""A checkpoint on disk: its contents, read from the headers alone, and its tensors, read at the speed of the disk.

``Checkpoint.open`` reads ``config.json``, the index and the header of each shard: kilobytes per shard, no tensor data. One error
lists all problems of the files. ``read_tensors`` then streams tensors in the order in which they lie on disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from math import prod
from mmap import mmap
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4lite.config import LoadProgress, Progress
from dsv4lite.errors import CheckpointError, shown
from dsv4lite.files import TABLE_BYTES, open_regular, parse_json, read_json
from dsv4lite.parallel.shard import Cut
from dsv4lite.weights.names import NameTables, Piece, translate

T = TypeVar("T", "TensorInfo", "TensorInfo | HeldTensor")
ExpertFormat = Literal["fp4", "fp8", "four_bit", "unquantized"]

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_EXPERT_FORMATS: Mapping[str, ExpertFormat] = {"I8": "fp4", "U8": "fp4", "F8_E4M3": "fp8"}

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MOST_TENSORS = 1 << 20  # of a checkpoint; V4-Pro has 145,000
_MOST_NAME = 256  # characters
_MOST_DIMENSIONS = 8

_BLOCK_BYTES = 32 << 20  # one read
_GAP_BYTES = 128 << 10  # gaps up to this size are read, too: cheaper than another read
_WINDOW_BYTES = 512 << 20  # most bytes read ahead of the consumer, apart from a larger single tensor
_READERS = 4  # concurrent reads; a single one does not saturate a fast drive or a network file system


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor on disk: its description and location.

    Attributes:
        name: Official name.
        dtype: Dtype code of the file format; a key of ``DTYPES``.
        shape: Shape as stored (a packed byte is one element).
        file: The shard.
        offset: First byte in the shard.
        nbytes: Length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    @property
    def place(self) -> str:
        """The file's name, for errors."""
        return self.file.name

    def cut(self, cut: Cut) -> Wanted:
        """Return a part of it, one slice per dimension in stored elements; without slices all of it."""
        return Wanted(self, cut)

    def part(self, piece: Piece) -> TensorInfo:
        """Return an official tensor that this one contains."""
        offset, nbytes, shape = self.offset, self.nbytes, self.shape
        for index in piece.index:
            length = shape[0]
            first, stop = (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
            row = nbytes // length
            offset, nbytes = offset + first * row, (stop - first) * row
            shape = shape[1:] if isinstance(index, int) else (stop - first, *shape[1:])
        return TensorInfo(name=piece.name, dtype=self.dtype, shape=shape, file=self.file, offset=offset, nbytes=nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor in memory, described as ``TensorInfo`` describes one on disk."""

    name: str
    tensor: Tensor
    place = "memory"

    @property
    def dtype(self) -> str:
        """Dtype code of the file format; PyTorch's name for dtypes that the format lacks."""
        dtype = self.tensor.dtype
        return next((code for code, known in DTYPES.items() if known == dtype), str(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def cut(self, cut: Cut) -> HeldTensor:
        return HeldTensor(name=self.name, tensor=self.tensor[cut])

    def part(self, piece: Piece) -> HeldTensor:
        return HeldTensor(name=piece.name, tensor=self.tensor[piece.index])


Described = TensorInfo | HeldTensor
"""A tensor with known name, dtype and shape, on disk or in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint. Holds no file handle and no data.

    Attributes:
        folder: Folder of its files.
        config: Contents of ``config.json``.
        generation_config: Contents of ``generation_config.json``; empty if there is none.
        headers: Every tensor by its official name.
    """

    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    headers: Mapping[str, TensorInfo] = field(repr=False)

    @classmethod
    def open(cls, folder: Path, *, names: Callable[[Mapping[str, Any]], NameTables]) -> Checkpoint:
        """Open a folder; ``names`` returns the name tables for the contents of ``config.json``.

        Raises:
            CheckpointError: The files are damaged; lists all problems.
            UnsupportedError: Raised by ``names`` for an unknown family, before any problem of the tensor files is reported.
        """
        problems = _Problems()
        found: list[dict[str, Any]] = []
        with problems.collected():
            found.append(read_config(folder))
        known = names(found[0]) if found else NameTables()
        for read in (read_generation_config, read_headers):
            with problems.collected():
                found.append(read(folder))
        problems.check(folder)
        config, generation_config, external = found
        headers = official(external.values(), known.of_checkpoint(external), str(folder))
        return cls(folder=folder, config=config, generation_config=generation_config, headers=headers)

    @property
    def quantized(self) -> bool:
        """Whether any matrix is stored in FP8 or packed FP4."""
        return any(info.dtype in _EXPERT_FORMATS and name.endswith(".weight") for name, info in self.headers.items())

    @property
    def expert_format(self) -> ExpertFormat:
        """Format of the routed experts, derived from their dtype because not all configs state it.

        Raises:
            CheckpointError: Experts have different formats.
        """
        dtypes = {info.dtype for name, info in self.headers.items() if ".experts." in name and name.endswith(".weight")}
        formats: set[ExpertFormat] = {_EXPERT_FORMATS.get(dtype, "unquantized") for dtype in dtypes}
        if len(formats) > 1:
            raise CheckpointError(
                f"{self.folder}: routed experts come in {' and '.join(sorted(formats))}; all must have one format"
            )
        return formats.pop() if formats else "unquantized"


def locate(model: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model; a hub id is downloaded first.

    Args:
        weights: Also download the tensors; otherwise only configuration, tokenizer and chat template.

    Raises:
        CheckpointError: ``model`` is not a folder, and the hub cannot provide it.
    """
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):  # unlike the methods of Path, os.path functions never raise
        return folder
    if os.path.lexists(folder) or folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"{model!r} is not a folder; give the one that holds config.json, or a hub id such as 'owner/name'")
    from huggingface_hub import snapshot_download  # slow to import, and not needed for local folders

    wanted = ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        fetched = snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"])
    except Exception as error:  # network, permissions, names, disk: the hub's errors have no common base class
        raise CheckpointError(
            f"{model!r} is not a folder, and the hub did not give it (revision {revision or 'main'!r}): {error}. "
            "Check the spelling, the network and your access token, or download it beforehand and pass its folder"
        ) from error
    return Path(fetched)


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json``; older exports of ModelOpt keep its ``quantization_config`` in ``hf_quant_config.json``.

    Raises:
        CheckpointError: A file is missing or not a JSON object.
    """
    if not os.path.lexists(folder / "config.json"):
        raise CheckpointError(f"{folder} has no config.json; is it the folder of a model?")
    raw, other = read_json(folder / "config.json"), folder / "hf_quant_config.json"
    if raw.get("quantization_config") is None and os.path.lexists(other):
        found = read_json(other).get("quantization")
        if isinstance(found, dict) and found.get("quant_algo"):  # without it, only KV rows are quantized
            raw["quantization_config"] = {"quant_method": "modelopt", **found}
    return raw


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return ``generation_config.json``, or an empty dict if there is none.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    path = folder / "generation_config.json"
    return read_json(path) if os.path.lexists(path) else {}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors as a safetensors file. The safetensors library would need numpy, on which this package does not depend.

    Raises:
        OSError: The file cannot be written.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # larger items first keep every tensor aligned
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            rows = tensor.contiguous()
            if rows.nbytes:
                file.write((ctypes.c_char * rows.nbytes).from_address(rows.data_ptr()))


# ---------------------------------------------------------------------------------------------------------------- headers


class _Problems(list[str]):
    """Problems of a checkpoint's files, collected for one error that lists them all."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Catch a ``CheckpointError`` raised inside, and keep its problems."""
        try:
            yield
        except CheckpointError as error:
            self.extend(error.problems or [str(error)])

    def check(self, folder: Path | str) -> None:
        """Raise a ``CheckpointError`` if there are any."""
        if self:
            raise CheckpointError(f"the checkpoint in {folder} is damaged or incomplete; fetch it again:", problems=self)


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors of all shards, under the names in the files; raise one error that lists all problems."""
    problems, external = _Problems(), dict[str, TensorInfo]()
    shards = _shards(folder)
    place = {name: file for file, listed in shards.items() for name in listed or ()}
    for file, listed in shards.items():
        with problems.collected():
            found = read_header(folder / file)
            names = found.keys() if listed is None else listed
            external |= {name: found[name] for name in names if name in found}
            problems += [f"{name}: the index places it in {file}, which does not have it" for name in names if name not in found]
            twice = [name for name in found if place.get(name, file) != file]
            problems += [f"{name}: given twice, in {file} and in {place[name]}, where the index places it" for name in twice]
    problems.check(folder)
    return external


def official(external: Iterable[T], names: NameTables, where: str) -> dict[str, T]:
    """Return tensors by their official names.

    Raises:
        CheckpointError: A tensor is given twice, or its shape does not fit its name; lists all problems.
    """
    problems, headers = _Problems(), dict[str, T]()
    for info in external:
        pieces: list[Piece] = []
        with problems.collected():
            pieces = translate(info.name, info.shape, names)
        if len(headers) + len(pieces) > _MOST_TENSORS:
            problems.append(f"{where}: holds more than {_MOST_TENSORS:,} tensors, more than any model has")
            break
        for piece in pieces:
            if piece.name in headers:
                problems.append(f"{piece.name}: given twice, in {headers[piece.name].place} and in {info.place}")
            headers[piece.name] = info.part(piece)
    problems.check(where)
    return headers


def _shards(folder: Path) -> dict[str, list[str] | None]:
    """Return the shards in the order of their names, each with the tensors that the index lists (``None``: all in the file)."""
    if not os.path.lexists(folder / _INDEX):
        if not os.path.lexists(folder / _SINGLE):
            others = sorted(path.name for path in folder.glob("*.safetensors"))
            seen = f"; it has {', '.join(others[:3])} …, whose use only an index gives" if others else ""
            if not others and (pickled := sorted(path.name for path in folder.glob("*.bin"))):
                seen = f"; it has {pickled[0]}: pickled weights are not read, convert them to safetensors"
            raise CheckpointError(f"{folder} has neither {_INDEX} nor {_SINGLE}{seen}")
        return {_SINGLE: None}
    weight_map = read_json(folder / _INDEX, TABLE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / _INDEX} has no weight_map")
    wrong = [
        f"{shown(name)} is placed in {shown(file)}, which is not the name of a file beside it"
        for name, file in weight_map.items()
        if not isinstance(file, str) or Path(file).name != file or file == ".." or not _sane(file)
    ]
    wrong += [f"{shown(name)} is no name of a tensor" for name in weight_map if not _sane(name)]
    if wrong:
        raise CheckpointError(f"{folder / _INDEX} is malformed; fetch it again:", problems=wrong)
    shards: dict[str, list[str]] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: str(item[1])):
        shards.setdefault(file, []).append(name)
    return {**shards}


def _sane(name: str) -> bool:
    """Return whether a name has a plausible length and only printable characters."""
    return 0 < len(name) <= _MOST_NAME and name.isprintable()


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, under the names in the file.

    Raises:
        CheckpointError: The file is missing, truncated or not in this format; lists all problems.
    """
    with BufferedReader(open_regular(file)) as handle:
        try:
            size = os.fstat(handle.fileno()).st_size
            prefix = handle.read(8)
            if prefix == b"version ":
                raise CheckpointError(f"{file.name}: this is a Git LFS pointer, not the data; run 'git lfs pull'")
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(f"{file.name}: no safetensors header in its {size} bytes (truncated, or another format)")
            text = handle.read(length)
        except OSError as error:
            raise CheckpointError(f"{file.name}: cannot be read: {error.strerror or error}") from error
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{file.name}: its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file.name}: its header is not a JSON object")
    entries.pop("__metadata__", None)
    infos, problems = dict[str, TensorInfo](), _Problems()
    for name, entry in entries.items():
        with problems.collected():
            infos[name] = _entry(file, name, entry, 8 + length)
    problems += [] if problems else _misplaced(file, infos.values(), 8 + length, size)
    if problems:
        raise CheckpointError(f"{file} is damaged; fetch it again:", problems=problems)
    return infos


def _misplaced(file: Path, infos: Iterable[TensorInfo], data: int, size: int) -> list[str]:
    """Return the problems of tensors' offsets: the format has no gaps, no overlaps, and nothing after the last tensor."""
    problems, end = [], data
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            fault = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
            problems.append(f"{file.name}: {info.name} begins at byte {info.offset - data} of the data, not {end - data}: {fault}")
        end = max(end, info.offset + info.nbytes)
    if end != size:
        fault = "truncated" if end > size else "bytes after the last tensor"
        problems.append(f"{file.name}: {fault}: it has {size} bytes and its header promises {end}")
    return problems


def _entry(file: Path, name: str, entry: object, data: int) -> TensorInfo:
    """Check one entry of a header; ``data`` is the file offset of the first tensor."""
    if not _sane(name):
        raise CheckpointError(f"{file.name}: {shown(name)} is no name of a tensor")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if len(shape) <= _MOST_DIMENSIONS and all(
            type(n) is int and 0 <= n < 1 << 63 for n in (*shape, begin, end)
        ):
            pass
        case _:
            raise CheckpointError(f"{file.name}: the header entry of {name} is malformed: {shown(entry)}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file.name}: {name} has dtype {shown(dtype)}; known are {', '.join(DTYPES)}")
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{file.name}: {name} is {dtype} {shape}, {nbytes} bytes, but its offsets span {end - begin}")
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), file=file, offset=data + begin, nbytes=nbytes)


# ------------------------------------------------------------------------------------------------------------------- data


class Wanted(NamedTuple):
    """A tensor to read, or a part of it.

    Attributes:
        info: The tensor.
        cut: One slice per dimension, in stored elements; empty for all of it.
    """

    info: TensorInfo
    cut: Cut = ()

    @property
    def span(self) -> range:
        """Bytes of the file to read: for a cut, all rows that it touches."""
        first, stop, row = 0, 1, self.info.nbytes
        if self.cut and row:
            row //= self.info.shape[0]
            first, stop, step = self.cut[0].indices(self.info.shape[0])
            assert step == 1 and len(self.cut) == len(self.info.shape)
        return range(self.info.offset + first * row, self.info.offset + stop * row)


def read_tensors(wanted: Iterable[Wanted], *, progress: Progress | None = None) -> Iterator[tuple[TensorInfo, Tensor]]:
    """Read tensors in the order in which they lie on disk, not in the order of ``wanted``.

    A few threads read the shards one after the other, front to back, in large blocks, at most 512 MiB ahead of the consumer (or one
    tensor, if that is larger). Ranges that are not needed are skipped. A cut along dimension 0 reads only the rows of the cut. Cuts
    along other dimensions read whole rows and return a view, because a part of a row is usually smaller than one disk access.

    Closing the iterator early (``close``, or ``break`` and dropping it) stops the threads.

    Args:
        progress: Called after every block (phase ``read``, in bytes of the wanted tensors).

    Yields:
        The description of the whole tensor, and a CPU tensor. **The next one reuses the tensor's memory**: copy it to keep it.

    Raises:
        CheckpointError: A file cannot be read, or is shorter than its header says.
    """
    blocks = deque(_blocks(wanted))
    done, total = 0, sum(block.wanted_bytes for block in blocks)
    ahead: deque[tuple[_Block, mmap, list[Future[None]]]] = deque()
    ahead_bytes = 0
    spare: list[mmap] = []
    pool = ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="dsv4lite-read")
    try:
        while blocks or ahead:
            while blocks and (not ahead or ahead_bytes + blocks[0].nbytes <= _WINDOW_BYTES):
                block = blocks.popleft()
                buffer = _take_buffer(spare, block.nbytes)
                ahead.append((block, buffer, block.read(pool, buffer)))
                ahead_bytes += block.nbytes
            block, buffer, reads = ahead[0]
            for read in reads:
                read.result()
            yield from block.tensors(buffer)
            ahead.popleft()
            ahead_bytes -= block.nbytes
            spare.append(buffer)
            done += block.wanted_bytes
            if progress is not None:
                progress(LoadProgress(phase="read", done=done, total=total, unit="bytes"))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _take_buffer(spare: list[mmap], nbytes: int) -> mmap:
    """Return a spare buffer of suitable size, or new anonymous memory, whose pages the reader threads are the first to touch."""
    for i, buffer in enumerate(spare):
        if nbytes <= len(buffer) <= 2 * max(nbytes, _BLOCK_BYTES):
            return spare.pop(i)
    spare.clear()
    return mmap(-1, max(nbytes, _BLOCK_BYTES))


@dataclass(slots=True)
class _Block:
    """Bytes ``begin`` to ``end`` of a file, which are read together, and the wanted tensors in them."""

    file: Path
    begin: int
    end: int
    parts: list[Wanted]

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def wanted_bytes(self) -> int:
        return sum(len(part.span) for part in self.parts)

    def read(self, pool: ThreadPoolExecutor, buffer: mmap) -> list[Future[None]]:
        """Start reading; several threads read a block that is larger than one read (a single large tensor)."""
        target = memoryview(buffer)[: self.nbytes]
        starts = range(0, self.nbytes, _BLOCK_BYTES)
        return [pool.submit(_read_into, self.file, self.begin + at, target[at : at + _BLOCK_BYTES]) for at in starts]

    def tensors(self, buffer: mmap) -> Iterator[tuple[TensorInfo, Tensor]]:
        raw = torch.frombuffer(buffer, dtype=torch.uint8)
        for part in self.parts:
            dtype = DTYPES[part.info.dtype]
            at = part.span.start - self.begin
            data = raw[at : at + len(part.span)]
            if at % dtype.itemsize:
                data = data.clone()  # the file does not align this tensor
            shape = part.info.shape
            if not part.cut:
                yield part.info, data.view(dtype).view(shape)
            else:
                rows = range(*part.cut[0].indices(shape[0]))
                yield part.info, data.view(dtype).view(len(rows), *shape[1:])[(slice(None), *part.cut[1:])]


def _blocks(wanted: Iterable[Wanted]) -> Iterator[_Block]:
    """Sort the wanted tensors by file and offset, and gather neighbours into blocks."""
    block: _Block | None = None
    for part in sorted(wanted, key=lambda part: (part.info.file, part.span.start)):
        span = part.span
        if block is not None and block.file == part.info.file and span.start <= block.end + _GAP_BYTES:
            end = max(block.end, span.stop)
            if end - block.begin <= _BLOCK_BYTES:
                block.end = end
                block.parts.append(part)
                continue
        if block is not None:
            yield block
        block = _Block(file=part.info.file, begin=span.start, end=span.stop, parts=[part])
    if block is not None:
        yield block


def _read_into(file: Path, offset: int, target: memoryview) -> None:
    with open_regular(file) as handle:
        try:
            if sys.platform == "linux":
                os.posix_fadvise(handle.fileno(), offset, len(target), os.POSIX_FADV_WILLNEED)
            handle.seek(offset)
            while target:
                count = handle.readinto(target)
                if not count:
                    raise CheckpointError(f"{file} ended {len(target)} bytes early; it was changed while it was being read")
                target = target[count:]
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read at byte {offset}: {error.strerror or error}") from error
