from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import huggingface_hub.utils
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from dsv4lite.config import LoadProgress
from dsv4lite.errors import CheckpointError
from dsv4lite.weights import checkpoint as module
from dsv4lite.weights.checkpoint import Checkpoint, TensorInfo, Wanted, locate, read_header, read_tensors
from tests.tiny import TINY, v4_names, write_checkpoint

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float8_e4m3fn, torch.float8_e8m0fnu,
]  # fmt: skip


def some_tensors(count: int = 12, size: int = 40) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for i in range(count):
        raw = torch.randint(0, 2, (size + i, 8 * (1 + i % 3)), dtype=torch.uint8, generator=generator)
        tensors[f"t{i}"] = raw.view(DTYPES[i % len(DTYPES)])
    return tensors


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def write(folder: Path, tensors: dict[str, Tensor], shard_bytes: int | None = None) -> Checkpoint:
    return Checkpoint.open(write_checkpoint(folder, TINY, tensors.items(), shard_bytes=shard_bytes), names=v4_names)


def read_all(wanted: list[Wanted], **options: Any) -> dict[str, Tensor]:
    return {info.name: tensor.clone() for info, tensor in read_tensors(wanted, **options)}


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("dsv4lite-read")]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that small files have many of them and some tensors are larger than one."""
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1000)
    monkeypatch.setattr(module, "_WINDOW_BYTES", 3000)
    monkeypatch.setattr(module, "_GAP_BYTES", 100)


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    tensors = {f"layers.{i}.attn_norm.weight": torch.full((300,), float(i)) for i in range(4)}
    return write_checkpoint(tmp_path, TINY, tensors.items(), shard_bytes=2400)


def shard(folder: Path, number: int) -> Path:
    return folder / f"model-{number:05}-of-00002.safetensors"


# ------------------------------------------------------------------------------------------------------------------ opening


@pytest.mark.parametrize("shard_bytes", [None, 3000])
def test_open_describes_every_tensor(tmp_path: Path, shard_bytes: int | None) -> None:
    tensors = some_tensors()
    found = write(tmp_path, tensors, shard_bytes)
    assert {name: info.shape for name, info in found.headers.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    assert {name: module.DTYPES[info.dtype] for name, info in found.headers.items()} == {
        name: t.dtype for name, t in tensors.items()
    }
    assert bytes_of(found) == sum(tensor.nbytes for tensor in tensors.values())
    assert found.folder == tmp_path and found.config["hidden_size"] == 64 and found.generation_config == {}
    assert len({info.file for info in found.headers.values()}) == (
        1 if shard_bytes is None else len(list(tmp_path.glob("*.safetensors")))
    )


def test_open_reads_generation_config(two_shards: Path) -> None:
    (two_shards / "generation_config.json").write_text('{"temperature": 0.5}')
    assert Checkpoint.open(two_shards, names=v4_names).generation_config == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("expert", "shared", "quantized", "expected"),
    [
        (torch.int8, torch.float8_e4m3fn, True, "fp4"),
        (torch.uint8, torch.bfloat16, True, "fp4"),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, True, "fp8"),
        (torch.bfloat16, torch.float8_e4m3fn, True, "unquantized"),
        (torch.bfloat16, torch.bfloat16, False, "unquantized"),
    ],
)
def test_format_is_told_by_dtype(tmp_path: Path, expert: torch.dtype, shared: torch.dtype, quantized: bool, expected: str) -> None:
    found = write(
        tmp_path,
        {
            "layers.0.ffn.experts.0.w1.weight": torch.zeros(4, 4).to(expert),
            "layers.0.ffn.experts.0.w1.scale": torch.zeros(4, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "layers.0.ffn.shared_experts.w1.weight": torch.zeros(4, 4).to(shared),
            "layers.0.ffn.gate.tid2eid": torch.zeros(4, 2, dtype=torch.int64),
        },
    )
    assert (found.quantized, found.expert_format) == (quantized, expected)


def test_mixed_expert_formats_are_refused(tmp_path: Path) -> None:
    dtypes = (torch.int8, torch.float8_e4m3fn)
    found = write(tmp_path, {f"layers.0.ffn.experts.{e}.w1.weight": torch.zeros(4, 4).to(dtype) for e, dtype in enumerate(dtypes)})
    with pytest.raises(CheckpointError, match="fp4 and fp8"):
        _ = found.expert_format


# ------------------------------------------------------------------------------------------------------------- what is wrong


def problems(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, names=v4_names)
    return str(caught.value)


def test_all_problems_are_listed_at_once(two_shards: Path) -> None:
    shard(two_shards, 1).write_bytes(shard(two_shards, 1).read_bytes()[:-1])
    index = two_shards / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["layers.9.attn_norm.weight"] = shard(two_shards, 2).name
    raw["weight_map"]["layers.8.attn_norm.weight"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(two_shards, names=v4_names)
    assert len(caught.value.problems) == 3
    assert any("truncated" in line for line in caught.value.problems)
    assert any(line.startswith("layers.9.attn_norm.weight: the index places it in model-00002") for line in caught.value.problems)
    assert any("model-00003-of-00002.safetensors: cannot be read" in line for line in caught.value.problems)


def header(entries: Any, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer.*git lfs pull"),
        (b"\xff" * 64, "no safetensors header"),
        (header(b"not json"), "not JSON"),
        (header(b"\xff\xfe{}"), "not JSON"),
        (header([1, 2]), "not a JSON object"),
        (header({"a": 3}), "entry of a is malformed"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"), "entry of a is malformed"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"1234"), "entry of a is malformed"),
        (header({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"), "entry of a is malformed"),
        (header({"a": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "a has dtype 'Q4'; known are"),
        (
            header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
            r"a is F32 \[2\], 8 bytes, but its offsets span 4",
        ),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, b"12345678"), "truncated"),
    ],
)
def test_malformed_header_says_what_is_wrong(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"x.safetensors: .*{message}"):
        read_header(file)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_weight_map_is_refused(two_shards: Path, text: str) -> None:
    (two_shards / "model.safetensors.index.json").write_text(text)
    assert "no weight_map" in problems(two_shards)


def test_folder_without_weights_names_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "neither model.safetensors.index.json nor model.safetensors" in problems(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")  # the advice was to fetch it again
    assert "it has pytorch_model.bin: pickled weights are not read, convert them to safetensors" in problems(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    assert "it has adapter.safetensors" in problems(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------- hub


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "~/none-of-this-name", "a/b/c", __file__])
def test_path_that_is_no_folder_is_not_asked_from_the_hub(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=r"is not a folder; give the one that holds config\.json"):
        locate(model)


def test_hub_id_fetches_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, two_shards: Path) -> None:
    asked: list[tuple[str, Any, Any]] = []

    def fake(repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        files = ["config.json", "chat_template.jinja", "model.safetensors", "pytorch_model.bin", "inference/config.json", "a.py"]
        kept = list(
            huggingface_hub.utils.filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        assert kept == files[: 3 if "*.safetensors" in allow_patterns else 2]
        return str(two_shards)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert Checkpoint.open(locate("owner/name", "v2"), names=v4_names).folder == two_shards
    assert locate("owner/name", weights=False) == two_shards
    assert asked == [("owner/name", "v2", ["*.json", "*.jinja", "*.safetensors"]), ("owner/name", None, ["*.json", "*.jinja"])]


@pytest.mark.parametrize(
    "error", [huggingface_hub.errors.OfflineModeIsEnabled("offline"), ValueError("bad name"), RuntimeError("network")]
)
def test_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=f"'owner/name'.*{error}.*pass its folder") as caught:
        locate("owner/name")
    assert caught.value.__cause__ is error


# ------------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("shard_bytes", [None, 3000])
def test_reading_returns_the_written_bytes(tmp_path: Path, shard_bytes: int | None) -> None:
    tensors = some_tensors()
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "none": torch.empty(3, 0, dtype=torch.int64)}
    found = write(tmp_path, tensors, shard_bytes)
    read = read_all([Wanted(info) for info in found.headers.values()])
    assert read.keys() == tensors.keys()
    assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())


def test_reading_follows_the_disk_whatever_is_asked(tmp_path: Path) -> None:
    found = write(tmp_path, some_tensors(), 3000)
    infos = [info for info, _ in read_tensors(Wanted(info) for info in reversed(found.headers.values()))]
    assert len(infos) == len(found.headers)
    assert infos == sorted(infos, key=lambda info: (info.file, info.offset))


@pytest.fixture
def reads(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read takes from a file."""
    found, original = list[int](), module._read_into

    def counted(file: Path, offset: int, target: memoryview) -> None:
        found.append(len(target))
        original(file, offset, target)

    monkeypatch.setattr(module, "_read_into", counted)
    return found


def test_reading_a_part_touches_little_else(tmp_path: Path, reads: list[int]) -> None:
    found = write(tmp_path, some_tensors(count=30))
    wanted = [Wanted(found.headers[f"t{i}"]) for i in (3, 11, 12, 25)]
    assert read_all(wanted).keys() == {"t3", "t11", "t12", "t25"}
    useful = sum(item.info.nbytes for item in wanted)
    assert useful <= sum(reads) <= useful + 3 * module._GAP_BYTES


@pytest.mark.parametrize(("rows", "lengths"), [(50, [120, 120]), (20, [320])])
def test_wide_gap_is_skipped_and_a_narrow_one_read_along(tmp_path: Path, reads: list[int], rows: int, lengths: list[int]) -> None:
    found = write(tmp_path, {"a": torch.zeros(30), "b": torch.zeros(rows), "c": torch.zeros(30)})
    read_all([Wanted(found.headers["a"]), Wanted(found.headers["c"])])
    assert reads == lengths


@pytest.mark.usefixtures("small_blocks")
@given(data=st.data())
def test_reading_cuts_gives_the_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 60), st.integers(1, 40)))
    dtype = data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.int64]))
    tensors = {f"t{i}": torch.arange(shape[0] * shape[1]).view(shape).remainder(100).to(dtype) + i for i in range(3)}
    found = write(tmp_path_factory.mktemp("cut"), tensors)

    def part(length: int) -> slice:
        start = data.draw(st.integers(0, length))
        return slice(start, data.draw(st.integers(start, length)))

    cuts = {name: (part(shape[0]), part(shape[1])) for name in tensors}
    read = read_all([Wanted(found.headers[name], cut) for name, cut in cuts.items()])
    assert all(same_bytes(read[name], tensors[name][cut].clone()) for name, cut in cuts.items())


@pytest.mark.usefixtures("small_blocks")
def test_row_cut_reads_only_its_rows(tmp_path: Path) -> None:
    found = write(tmp_path, {"t": torch.arange(4000).view(100, 40)})
    reports: list[LoadProgress] = []
    (read,) = read_all([Wanted(found.headers["t"], (slice(25, 50), slice(0, 40)))], progress=reports.append).values()
    assert torch.equal(read, torch.arange(1000, 2000).view(25, 40))
    assert reports[-1].total == 25 * 40 * 8


def test_unaligned_tensor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    values = torch.tensor([1.5, -2.5])
    entries = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    file.write_bytes(header(entries, b"abc" + bytes(values.view(torch.uint8).tolist())))
    assert torch.equal(read_all([Wanted(info) for info in read_header(file).values()])["b"], values)


@pytest.mark.usefixtures("small_blocks")
def test_reading_reports_bytes_up_to_the_total(tmp_path: Path) -> None:
    tensors = some_tensors()
    found = write(tmp_path, tensors, 3000)
    reports: list[LoadProgress] = []
    for _ in read_tensors((Wanted(info) for info in found.headers.values()), progress=reports.append):
        pass
    assert len(reports) > 3
    assert [r.done for r in reports] == sorted(r.done for r in reports)
    assert {(r.phase, r.unit, r.total) for r in reports} == {("read", "bytes", bytes_of(found))}
    assert reports[-1].done == bytes_of(found)


@pytest.mark.usefixtures("small_blocks")
def test_reading_ahead_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = write(tmp_path, {f"t{i}": torch.zeros(100) for i in range(40)})
    started = 0
    original = module._Block.read

    def counted(self: Any, *args: Any) -> Any:
        nonlocal started
        started += self.nbytes
        return original(self, *args)

    monkeypatch.setattr(module._Block, "read", counted)
    consumed = 0
    for info, _ in read_tensors(Wanted(info) for info in found.headers.values()):
        assert started <= consumed + module._WINDOW_BYTES
        assert started >= min(consumed + module._WINDOW_BYTES - 2 * module._BLOCK_BYTES, bytes_of(found))
        consumed += info.nbytes
    assert started == consumed == bytes_of(found)


def bytes_of(found: Checkpoint) -> int:
    return sum(info.nbytes for info in found.headers.values())


def infos_of(found: Checkpoint) -> Iterator[Wanted]:
    return (Wanted(info) for info in found.headers.values())


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("leave", ["close", "exhaust", "error", "drop"])
def test_threads_end_with_the_iterator(tmp_path: Path, leave: str) -> None:
    found = write(tmp_path, some_tensors(), 3000)
    stream = read_tensors(infos_of(found))
    next(stream)
    assert reader_threads()
    if leave == "close":
        stream.close()  # type: ignore[attr-defined]
    elif leave == "exhaust":
        assert len(list(stream)) == len(found.headers) - 1
    elif leave == "error":
        with pytest.raises(KeyError):
            stream.throw(KeyError("stop"))  # type: ignore[attr-defined]
    else:
        del stream
    assert not reader_threads()


def test_unstarted_reading_starts_no_thread(tmp_path: Path) -> None:
    stream = read_tensors(infos_of(write(tmp_path, some_tensors())))
    assert not reader_threads()
    del stream


def damage_all(file: Path) -> None:
    file.unlink()


def damage_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("damage", "message"), [(damage_all, "cannot be read"), (damage_end, "bytes early")])
def test_file_that_changes_while_being_read_is_an_error(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    found = write(tmp_path, some_tensors(), 3000)
    files: list[Path] = sorted({info.file for info in found.headers.values()})
    damage(files[-1])
    read: list[TensorInfo] = []
    with pytest.raises(CheckpointError, match=message):
        for info, _ in read_tensors(infos_of(found)):
            read.append(info)
    assert {info.file for info in read} >= set(files[:-1])
    assert not reader_threads()
