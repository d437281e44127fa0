"""Broken and hostile checkpoints: each fails the start with one typed error that says what is wrong; nothing hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4lite import LLM, CheckpointError, ConfigError, DSV4LiteError, SamplingParams, plan_memory
from dsv4lite.__main__ import main
from dsv4lite.layout import Layout
from dsv4lite.text.tokenizer import Tokenizer
from tests.e2e.engines import MODEST, SMALL, opened, write_model
from tests.mla import write_random_model

HANG_S = 300  # far more than any start takes on a busy machine
CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
VOCABULARY, TOKENIZER = "tokenizer.json", "tokenizer_config.json"
SETTINGS = (CONFIG, GENERATION, INDEX, VOCABULARY, TOKENIZER)
TABLE = "layers.0.ffn.gate.tid2eid"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of two shards and every settings file."""
    folder = write_model(tmp_path_factory.mktemp("intact"), shard_bytes=200_000)
    (folder / GENERATION).write_text("{}")
    (folder / TOKENIZER).write_text("{}")
    return folder


@pytest.fixture
def copy(tmp_path: Path, intact: Path) -> Path:
    return shutil.copytree(intact, tmp_path / "copy")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def change_json(name: str, change: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path) -> None:
        raw = json.loads((folder / name).read_text())
        result = change(raw)
        (folder / name).write_text(json.dumps(raw if result is None else result))

    return damage


def config(**values: Any) -> Damage:
    return change_json(CONFIG, lambda raw: raw.update(values))


def weight_map(**values: Any) -> Damage:
    return change_json(INDEX, lambda raw: raw["weight_map"].update(values))


def holds(name: str, content: bytes | str) -> Damage:
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def sparse(name: str, size: int) -> Damage:
    """A file of any size that takes no room on the disk."""
    return lambda folder: os.truncate(folder / name, size)


def header(change: Callable[[dict[str, Any]], str | None], *, more: int = 0) -> Damage:
    """Change the header of the first shard: in place, or to a text; and how much data there is."""

    def damage(folder: Path) -> None:
        file = shards(folder)[0]
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        entries.pop("__metadata__", None)
        text = (change(entries) or json.dumps(entries)).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        os.truncate(file, file.stat().st_size + more)

    return damage


def first(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entry whose data come first."""
    return min(entries.values(), key=lambda entry: entry["data_offsets"])


def drop_first(entries: dict[str, Any]) -> None:
    del entries[min(entries, key=lambda name: entries[name]["data_offsets"])]


def end_of(entries: dict[str, Any]) -> int:
    return max(entry["data_offsets"][1] for entry in entries.values())


def add(name: str, shape: list[int], nbytes: int = 0, dtype: str = "I8") -> Damage:
    """Add a tensor after the others, and to the index."""

    def damage(folder: Path) -> None:
        def change(entries: dict[str, Any]) -> None:
            end = end_of(entries)
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}

        header(change, more=nbytes)(folder)
        weight_map(**{name: shards(folder)[0].name})(folder)

    return damage


def routes(*values: int) -> Damage:
    """Let the second token's first experts be others."""

    def damage(folder: Path) -> None:
        file = folder / json.loads((folder / INDEX).read_text())["weight_map"][TABLE]
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        begin = 8 + length + json.loads(raw[8 : 8 + length])[TABLE]["data_offsets"][0] + 8 * SMALL["num_experts_per_tok"]
        raw[begin : begin + 8 * len(values)] = b"".join(value.to_bytes(8, "little", signed=True) for value in values)
        file.write_bytes(raw)

    return damage


def vocabulary(change: Callable[[Any], Any]) -> Damage:
    """Change the model of the tokenizer, or put another one in its place."""
    return change_json(VOCABULARY, lambda raw: raw.update(model=change(raw["model"]) or raw["model"]))


def twice_in_two_shards(folder: Path) -> None:
    """The second shard has a tensor that the index places in the first one, too."""
    raw = json.loads((folder / INDEX).read_text())
    second = shards(folder)[1]
    moved = next(name for name, file in raw["weight_map"].items() if file == second.name)
    raw["weight_map"][moved] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(raw))
    header(lambda entries: entries.update({moved: {"dtype": "I8", "shape": [0], "data_offsets": [end_of(entries)] * 2}}))(folder)


DEEP = "[" * 900 + "]" * 900
SIZES = {
    "hidden_size": (0, -1, 2**63, 10**400, 1.0, True, "64", [64]),
    "num_hidden_layers": (0, 10**9),
    "n_routed_experts": (10**9, 2**63),
    "hc_sinkhorn_iters": (10**9,),
    "sliding_window": (2**63,),
    "vocab_size": (2**31, 10**400),
    "index_topk": (10**400,),
    "rms_norm_eps": (10**400, -1.0, 1e300),
    "compress_rope_theta": (1, 1e300),
    "max_position_embeddings": (2**63,),
    "num_hash_layers": (10**9,),
    "eos_token_id": (2**31, 96),
}
CONFIG_ERRORS: dict[str, tuple[str, Damage]] = {
    **{f"{key}={value!r:.20}": (rf"{key}=.* must be", config(**{key: value})) for key, values in SIZES.items() for value in values},
    "model_type=[]": (r"model_type=\[\] is not supported", config(model_type=[])),
    "several sizes": (r"hc_mult=<an integer of .*; hidden_size=0 ", config(hidden_size=0, hc_mult=10**400)),
    "many experts in all": (
        "have more than 131072 experts in all",
        config(num_hidden_layers=200, n_routed_experts=4096, compress_ratios=[0] * 201),
    ),
    "many keys": ("keys; at most 1000", config(**{f"num_hidden_layer{i}": 1 for i in range(2000)})),
    "long key": ("hidden_size=0", config(**{"x" * 100_000: 1, "hidden_size": 0})),
    "architectures": ("only DeepseekV4ForCausalLM", config(architectures=["x" * 10_000] * 100)),
    "rope_scaling=[]": (r"rope_scaling=\[\] must be an object", config(rope_scaling=[])),
    "WordLevel": ("byte-level", vocabulary(lambda model: {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})),
}
CHECKPOINT_ERRORS: dict[str, tuple[str, Damage]] = {
    # -- any JSON file
    **{f"{name} empty": (name, holds(name, b"")) for name in SETTINGS},
    **{f"{name} not UTF-8": (name, holds(name, b'{"a": "\xff"}')) for name in SETTINGS},
    **{f"{name} deep": (name, holds(name, f'{{"a": {DEEP}}}')) for name in SETTINGS},
    **{f"{name} deeper": (name, holds(name, '{"a":' * 90_000)) for name in SETTINGS},
    **{f"{name} huge": (f"{name}.* bytes; at most", sparse(name, 1 << 30)) for name in SETTINGS},
    **{f"{name} a list": (name, holds(name, "[]")) for name in SETTINGS},
    **{
        f"{name} {text}": (f"{name}.*{message}", holds(name, text))
        for name in (CONFIG, GENERATION, INDEX, TOKENIZER)
        for text, message in (
            ('\ufeff{"a": 1}', "BOM"),
            ('{"a": 1, "a": 2}', "the key 'a' twice"),
            ('{"a": NaN}', "'NaN' is not a finite number"),
            ('{"a": 1e400}', "'1e400' is not a finite number"),
            ('{"a": ' + "1" * 5000 + "}", "digits"),
        )
    },
    # -- index
    **{
        f"shard {name!r:.20}": ("'a' is placed in .*, which is not the name of a file", weight_map(a=name))
        for name in ("../x", "/etc/passwd", "..", ".", "", "a\0b", "a\nb", "\ud800", "x" * 5000, 5, None, ["x"])
    },
    "tensor without a name": (r"'a\\n' is no name", weight_map(**{"a\n": "x"})),
    "no such shard": ("x.safetensors: cannot be read: No such file", weight_map(a="x.safetensors")),
    "tensor in two shards": ("given twice, in .*00002.* and in .*00001", twice_in_two_shards),
    # -- header
    "offsets overlap": ("overlaps the tensor before it", header(lambda e: e.update(x={**first(e)}), more=0)),
    "hole": ("leaves a hole before it", header(drop_first)),
    "surplus": ("bytes after the last tensor", header(lambda e: None, more=10)),
    "truncated": ("truncated", header(lambda e: None, more=-1)),
    "backwards": ("malformed|span", header(lambda e: first(e).update(data_offsets=first(e)["data_offsets"][::-1]))),
    "beyond": ("malformed", header(lambda e: first(e).update(data_offsets=[0, 2**63]))),
    "key twice": (
        "has the key '.*' twice",
        header(lambda e: json.dumps(e)[:-1] + f', "{next(iter(e))}": {json.dumps(first(e))}}}'),
    ),
    "header deep": ("nested", header(lambda e: f'{{"a": {DEEP}}}')),
    "header NaN": ("not a finite number", header(lambda e: '{"a": NaN}')),
    "header UTF-16": ("not JSON", lambda f: shards(f)[0].write_bytes(b"\x06\0\0\0\0\0\0\0" + "{}".encode("utf-16"))),
    "header beyond the file": ("no safetensors header", lambda f: shards(f)[0].write_bytes(b"\xff" * 7 + b"\0{}")),
    "bool as a size": ("malformed", header(lambda e: first(e).update(shape=[True]))),
    "many dimensions": ("malformed", header(lambda e: first(e).update(shape=[1] * 100_000))),
    "size of 2**63": ("malformed", header(lambda e: first(e).update(shape=[2**63, 0]))),
    "dtype": ("has dtype 'Q4'", header(lambda e: first(e).update(dtype="Q4"))),
    "all entries are named": (r"(?s)(malformed.*){9}", header(lambda e: [entry.update(shape=-1) for entry in e.values()] and None)),
    "a billion empty experts": ("at most 4096 experts", add("layers.0.mlp.experts.gate_up_proj", [10**9, 0, 1])),
    "empty experts": ("nothing empty", add("layers.0.mlp.experts.gate_up_proj", [4, 0, 1])),
    "a billion experts": ("at most 4096 experts", add("layers.0.mlp.experts.down_proj", [10**9, 1, 1], 10**9)),
    "unexpected": ("a.b: unexpected", add("a.b", [2**30], 2**30)),
    "layer without a number": ("layers.x.attn_norm.weight: unexpected", add("layers.x.attn_norm.weight", [2], 2)),
    "layers alone": ("layers: unexpected", add("layers", [2], 2)),
    "tensor under two names": ("embed.weight: given twice", add("model.embed_tokens.weight", [2, 2], 16, "F32")),
    # -- data
    **{
        f"expert {value}": (rf"{TABLE}: 1 ids .* first one {value} at \[1, 0\]; ids are from 0 to 3", routes(value))
        for value in (4, -1, 2**62)
    },
    "expert twice": (rf"{TABLE}: 1 rows have an id twice, the first one row 1: \[2, 2\]", routes(2, 2)),
    # -- tokenizer
    **{
        f"token id {value}": (
            f"token id {value}; ids are below the model's vocab_size=96" if 0 < value < 2**32 else VOCABULARY,
            vocabulary(lambda model, value=value: model["vocab"].update(zzz=value)),
        )
        for value in (96, 2**31, 2**32 - 1, 2**32, -1)
    },
    "panic": (VOCABULARY, vocabulary(lambda model: model.update(continuing_subword_prefix="#" * 99, merges=["a b"]))),
    **{
        f"eos_token={value!r}": ("eos_token .* is not in the vocabulary", holds(TOKENIZER, json.dumps({"eos_token": value})))
        for value in (5, ["a"], {"content": ["a"]}, "zzz", "\ud800")
    },
    "add_bos_token": ("add_bos_token='yes' must be", holds(TOKENIZER, '{"add_bos_token": "yes"}')),
}
CASES: dict[str, tuple[type[DSV4LiteError], str, Damage]] = {
    **{name: (ConfigError, *case) for name, case in CONFIG_ERRORS.items()},
    **{name: (CheckpointError, *case) for name, case in CHECKPOINT_ERRORS.items()},
}


def attempt(work: Callable[[], object]) -> BaseException | None:
    """Return what a function raised; it must not hang."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def start(folder: Path, **settings: Any) -> BaseException | None:
    """Return what starting an engine raised."""
    return attempt(lambda: LLM(str(folder), **{**MODEST, **settings}).__enter__().close())


def test_intact_checkpoint_runs(copy: Path) -> None:
    with opened(copy) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=2, ignore_eos=True)).usage.completion_tokens == 2


@pytest.mark.parametrize("case", CASES)
def test_damage_is_one_typed_error(copy: Path, case: str) -> None:
    kind, message, damage = CASES[case]
    damage(copy)
    error = start(copy)
    assert isinstance(error, kind), repr(error)
    with pytest.raises(kind, match=message):
        raise error
    assert len(str(error)) < 20_000


SPECIAL_FILES: dict[str, Damage] = {
    "directory": os.mkdir,
    "FIFO": os.mkfifo,
    "dangling link": lambda path: os.symlink("nowhere", path),
    "looping link": lambda path: os.symlink(path.name, path),
    "device": lambda path: os.symlink("/dev/zero", path),
}


@pytest.mark.parametrize("name", [*SETTINGS, "shard"])
@pytest.mark.parametrize("kind", SPECIAL_FILES)
def test_special_file_is_not_opened(copy: Path, name: str, kind: str) -> None:
    path = shards(copy)[1] if name == "shard" else copy / name
    path.unlink()
    SPECIAL_FILES[kind](path)
    error = start(copy)
    assert isinstance(error, CheckpointError) and f"{path.name}: cannot be read: " in str(error), repr(error)


def test_problems_of_several_files_are_listed_at_once(copy: Path) -> None:
    for name in (CONFIG, GENERATION):
        (copy / name).write_text("{")
    for shard in shards(copy)[:2]:
        os.truncate(shard, 100)
    error = start(copy)
    assert isinstance(error, CheckpointError) and len(error.problems) == 4, repr(error)


@pytest.mark.parametrize(
    "case", ["n_routed_experts=1000000000", "hc_sinkhorn_iters=1000000000", "model_type=[]", "config.json deep"]
)
def test_planning_and_random_weights_refuse_the_same_configs(copy: Path, case: str) -> None:
    kind, message, damage = CASES[case]
    damage(copy)
    for work in (
        lambda: plan_memory(str(copy), **MODEST),
        lambda: plan_memory(str(copy), load_format="dummy", **MODEST),
        lambda: LLM(str(copy), load_format="dummy", **MODEST).__enter__().close(),
    ):
        error = attempt(work)
        assert isinstance(error, kind), repr(error)
        with pytest.raises(kind, match=message):
            raise error


@pytest.mark.parametrize("key", ["expert_dtype", "torch_dtype"])
def test_dtype_that_is_a_list_is_passed_over_with_random_weights(copy: Path, key: str) -> None:
    config(quantization_config={"quant_method": "fp8"}, **{key: []})(copy)
    assert plan_memory(str(copy), load_format="dummy", **MODEST).fits


@pytest.mark.parametrize("model", ["a\0b", "x" * 5000, "~no-such-user/x", "/dev/null", ""])
def test_name_that_is_no_folder_is_a_typed_error(model: str) -> None:
    assert isinstance(attempt(lambda: plan_memory(model)), DSV4LiteError)


def test_overrides_are_checked_as_the_config_is(copy: Path) -> None:
    for overrides in ({5: 1}, {"hidden_size": 10**5000}, {"model_type": {}}, {"eos_token_id": 2**31}):
        assert isinstance(attempt(lambda o=overrides: plan_memory(str(copy), hf_overrides=o)), ConfigError)


def test_devices_that_cannot_share_a_model_are_planned_as_replicas(copy: Path) -> None:
    config(quantization_config={"quant_method": "fp8"}, num_attention_heads=3, o_groups=3)(copy)
    plan = plan_memory(str(copy), load_format="dummy", devices=7, **MODEST)
    assert [found.layout for found in plan.layouts] == [Layout(dp=7)]


@pytest.mark.parametrize("case", ["n_routed_experts=1000000000", "truncated", "config.json deep", "token id 2147483648"])
def test_command_line_says_what_is_wrong(copy: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, message, damage = CASES[case]
    damage(copy)
    commands = [["generate", "a", "--model", str(copy), "--device", "cpu"]]
    if not case.startswith("token"):
        commands.append(["plan", str(copy), "--device", "cpu"])
    for command in commands:
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert err.startswith(f"dsv4lite: {kind.__name__}: ") and "Traceback" not in err and not out
        assert re.search(message, err)


# -------------------------------------------------------------------------------------------------------------------- fuzzing


NUMBERS = (0, 1, -1, 1.5, 1e300, 2**31, 2**32 - 1, 2**62, 2**63, 10**9, 10**400, float("nan"), float("inf"))
OTHERS = (None, True, "", "a\0", "\ud800", "F32", [], {}, [[[]]], [10**9, 0, 1], {"a": {}})
junk = st.sampled_from(NUMBERS) | st.sampled_from(OTHERS)


def mutated(text: str, data: st.DataObject) -> bytes:
    """Return a JSON text with other values at one to four places, or with up to three other bytes."""
    if data.draw(st.integers(0, 3), "0 for bytes"):
        raw = json.loads(text)
        for _ in range(data.draw(st.integers(1, 4))):
            node = raw
            while isinstance(node, dict | list) and node:
                key = data.draw(st.sampled_from(sorted(node)[:200] if isinstance(node, dict) else range(min(len(node), 200))))
                if not isinstance(node[key], dict | list) or not node[key] or not data.draw(st.integers(0, 2)):
                    node[key] = deepcopy(data.draw(junk))
                    break
                node = node[key]
        return json.dumps(raw).encode()
    raw_bytes = bytearray(text.encode())
    places = st.lists(st.tuples(st.integers(0, len(raw_bytes) - 1), st.integers(0, 255)), min_size=1, max_size=3)
    for place, byte in data.draw(places):
        raw_bytes[place] = byte
    return bytes(raw_bytes)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory, intact: Path) -> Path:
    return shutil.copytree(intact, tmp_path_factory.mktemp("workbench") / "copy")


@given(name=st.sampled_from([CONFIG, "shard"]) | st.sampled_from(SETTINGS), data=st.data())
def test_any_change_opens_or_is_a_typed_error(workbench: Path, name: str, data: st.DataObject) -> None:
    path = shards(workbench)[0] if name == "shard" else workbench / name
    before = path.read_bytes()
    try:
        if name == "shard":
            length = int.from_bytes(before[:8], "little")
            text = mutated(before[8 : 8 + length].decode(), data)
            prefix = data.draw(st.sampled_from([len(text), len(text) + 1, 0, 2**63]))
            path.write_bytes(prefix.to_bytes(8, "little") + text + before[8 + length :])
        else:
            path.write_bytes(mutated(before.decode(), data))
        with contextlib.suppress(DSV4LiteError):
            plan_memory(str(workbench), **MODEST)
        with contextlib.suppress(DSV4LiteError):
            loaded = Tokenizer.from_folder(workbench, vocab_size=SMALL["vocab_size"])
            assert loaded.vocab_size <= SMALL["vocab_size"]
    finally:
        path.write_bytes(before)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("stages", [1, 2])
def test_tensors_for_which_the_config_has_no_use_are_refused(tmp_path: Path, stages: int) -> None:
    """V3.2 read as V3: pipeline stages took the tensors that a layer has besides for those of another stage."""
    write_random_model(tmp_path, "v32")
    with pytest.raises(CheckpointError, match=r"layers\.\d\.attn\.indexer\.wk\.weight: unexpected"):
        with opened(tmp_path, hf_overrides={"model_type": "deepseek_v3"}, pipeline_parallel_size=stages):
            pass


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("blocks", [0, 1])
def test_config_with_too_few_layers_is_refused(tmp_path: Path, layers: int, stages: int, blocks: int) -> None:
    """The layer after the last was taken for an MTP block, and pipeline stages ignored all layers after the last."""
    write_random_model(tmp_path, "v3", num_hidden_layers=5)
    overrides = {"num_hidden_layers": layers, "num_nextn_predict_layers": blocks}
    with pytest.raises(CheckpointError, match=rf"layers\.{layers}\.attn_norm\.weight: unexpected"):
        with opened(tmp_path, hf_overrides=overrides, pipeline_parallel_size=stages):
            pass
