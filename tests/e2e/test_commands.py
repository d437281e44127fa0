"""The commands that describe: ``plan`` and ``inspect``; and what importing the package costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsv4lite import plan_memory, tiny_model
from dsv4lite.__main__ import main
from dsv4lite.debug.inspection import inspect_checkpoint
from tests.e2e.engines import REFRESHED, SMALL, write_model
from tests.packings import awq, write_packed

GIB = 1 << 30


def test_plan_answers_first_and_shows_equal_devices_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "h200", "--tensor-parallel-size", "2", "--max-model-len", "8192"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tiny_model()}: fits, with ") and "64 sequences of 8,192 tokens at once" in first
    assert second.startswith("  planned for NVIDIA H200")
    assert len([line for line in rest if "each of 2 devices (cuda)" in line]) == 1
    assert len([line for line in rest if "workspace of a step" in line]) == 1


def test_sizes_that_are_no_numbers_of_bytes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers from 2**63 on were planned for; others were refused with a value that nobody had given, such as 0 for 0.5."""
    for text in ("inf", "nan", "1e400", "80GiBB", "1e300", "8388608TiB", "-1e300", "-5", "0", "0.5"):
        for option in ("--memory", "--kv-cache-memory"):
            with pytest.raises(SystemExit) as ended:
                main(["plan", f"{option}={text}"])
            said = capsys.readouterr().err
            assert ended.value.code == 2 and f"argument {option}: {text!r} is not a size" in said
            assert "from 1 byte to 8 EiB; write for example 80GiB" in said


@pytest.mark.parametrize(("prompt", "said"), [("-", "standard input is closed"), ("é", "'ascii' codec can't encode")])
def test_streams_that_cannot_be_used_are_errors_without_a_traceback(prompt: str, said: str) -> None:
    program = "import sys; sys.stdin = None; sys.stdout.reconfigure(encoding='ascii'); from dsv4lite.__main__ import main; " + (
        f"sys.exit(main(['generate', {prompt!r}, '--device', 'cpu']))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2 and ended.stderr.startswith("dsv4lite: ") and said in ended.stderr


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_prompts_that_are_not_unicode_are_told_where_and_not_shown(locale: str) -> None:
    """In the C locale such a prompt was printed, and an error about surrogates named neither the bytes nor their place."""

    def generate(prompt: bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "dsv4lite", "generate", prompt, "--device", "cpu", "--max-tokens", "1"]
        settings = {**os.environ, "LC_ALL": locale, **environment}
        return subprocess.run(command, input=b"abc\xe4f", capture_output=True, timeout=300, check=False, env=settings)

    for prompt, told in ((b"-", rb"standard input must be UTF-8, and has b'\xe4' at byte 3"), (b"abc\xe4f", rb"has '\udce4' at 3")):
        ended = generate(prompt)
        assert (ended.returncode, ended.stdout) == (2, b"") and told in ended.stderr
    assert generate(b"-", PYTHONIOENCODING="latin-1").stdout.startswith(b"abc\xe4f")


def test_options_that_would_have_no_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The one was taken for a plain prompt, the other planned for any layout."""
    for given, told in (
        (["generate", "abc", "--reasoning", "high"], "--reasoning high is for the user's turn of a chat; give --chat, too"),
        (["plan", "--gpu", "h200", "--devices", "4", "--tensor-parallel-size", "257"], "devices=4 compares all layouts, but"),
    ):
        assert main(given) == 2
        assert f"ConfigError: {told}" in capsys.readouterr().err


def test_plan_that_does_not_fit_says_why_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--memory", "4MiB"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{tiny_model()}: does not fit: the weights (") and "use a device with more memory" in first


def test_plan_takes_every_layout_and_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_model(tmp_path / "plain"))
    flags = ["--expert-parallel-size", "2", "--data-parallel-size", "2", "--pipeline-parallel-size", "3"]
    assert main(["plan", folder, "--gpu", "l40s", "--json", "--max-num-batched-tokens", "512", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    settings = {"expert_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 3, "max_num_batched_tokens": 512}
    plan = plan_memory(folder, gpu="l40s", **settings)
    assert [device["weights"] for device in found["per_device"]] == [device.weights for device in plan.per_device]
    assert len(found["per_device"]) == 6
    for dtype in ("bfloat16", "float32"):
        assert main(["plan", folder, "--gpu", "l40s", "--dtype", dtype, "--kv-cache-dtype", dtype]) == 0
        assert f"{dtype} matrices" in capsys.readouterr().out


def test_plan_shows_itself_in_prompts_and_notebooks() -> None:
    plan = plan_memory(tiny_model(), memory_bytes=GIB)
    assert repr(plan).startswith(f"MemoryPlan({tiny_model()!r}, fits, with ") and len(repr(plan)) < 300
    assert plan._repr_html_().startswith("<pre>") and "KV cache" in plan._repr_html_()


def test_inspect_shows_what_the_shipped_checkpoint_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tiny_model()}: complete, ") and "tensors" in first
    said = "\n".join(rest)
    for part in ("deepseek_v4", "FP8", "routed experts", "4,096 of the model's 4,096 tokens", "mtp"):
        assert part in said
    assert main(["inspect", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    stored = sum(path.stat().st_size for path in Path(tiny_model()).glob("*.safetensors"))
    assert 0.95 * stored < sum(group["bytes"] for group in report["groups"]) < stored
    assert (report["chat"], report["drafter"], report["expert_format"], report["problems"]) == ("deepseek_v4", "mtp", "fp4", [])


def test_inspect_lists_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path, change=lambda name, tensor: None if name == "norm.weight" else tensor)
    (folder / "tokenizer.json").unlink()
    assert main(["inspect", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "2 problems" in said.splitlines()[0] and "norm.weight: missing" in said and "tokenizer.json is missing" in said


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (SMALL, "mtp.0.attn.wq_a.weight"),
        (SMALL, "mtp.0.e_proj.weight"),  # by which it is known
        (REFRESHED, "mtp.1.markov_head.markov_w1.weight"),
        (REFRESHED, "mtp.0.main_proj.weight"),
    ],
)
def test_inspect_lists_what_a_drafter_lacks(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    """Of a block drafter it looked at no tensor, and called the checkpoint complete."""
    report = inspect_checkpoint(str(write_model(tmp_path, config, change=lambda n, tensor: None if n == name else tensor)))
    assert report.problems == (f"{name}: missing",)


def test_inspect_names_a_weight_only_format(tmp_path: Path) -> None:
    report = inspect_checkpoint(str(write_packed(tmp_path, awq(32)).folder))
    assert report.problems == () and report.matrices != "unquantized" and report.groups
    assert report.matrices in str(report)


def test_inspect_reads_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text(json.dumps(dict(SMALL)))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "no weights in this folder" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "CheckpointError" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys, time

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            except KeyboardInterrupt:
                raise ImportError("half imported")

sys.meta_path.insert(0, Interrupt())
from dsv4lite.__main__ import main
sys.exit(main(["plan"]))
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts can be interrupted, even if this one was started in the background, which cannot."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_torch_is_imported_ends_quietly() -> None:
    """numpy and torch made a traceback of another error of it."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_text_is_generated_ends_quietly() -> None:
    command = [sys.executable, "-m", "dsv4lite", "generate", "def f(", "--max-tokens", "10000", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(12).startswith(b"def f(")
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        assert (running.wait(300), said) == (130, b"")


def test_library_imports_torch_and_nothing_optional() -> None:
    """Whatever a first engine needs is imported with the class; numpy comes with torch where it is installed."""
    program = """
import sys
from dsv4lite import LLM, AsyncLLM, tiny_model

optional = {"tqdm", "llguidance", "jinja2", "matplotlib", "trl", "verl", "transformers", "IPython"}
assert not optional & set(sys.modules), optional & set(sys.modules)
assert "torch" not in sys.modules
with LLM(tiny_model(), device="cpu", max_num_seqs=2, kv_cache_memory_bytes=16 << 20) as llm:
    llm.generate("a", llm.default_params.replace(max_tokens=1))
assert not (optional - {"tqdm"}) & set(sys.modules), optional & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
