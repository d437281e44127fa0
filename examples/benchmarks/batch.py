"""Kill a batch at random moments and continue it: rows per second, memory, and whether each row has one output.

    python -m examples.benchmarks.batch                          # 20,000 rows, ten kills, the shipped checkpoint
    python -m examples.benchmarks.batch --rows 500 --kills 3

Writes a file of prompts and runs ``python -m dsv4lite batch`` over it. The process gets SIGKILL at random moments, and the same
command continues; the last run goes to the end. Prints for each run the rows that it wrote, rows per second, and its resident
memory in MiB after its first row, at half of its rows and after its last. The exit status is 1 if a row is missing or came twice.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from dsv4lite import tiny_model


class Sample(NamedTuple):
    """One sample of a run: the time, the lines in the file of outputs, and the resident bytes of the process."""

    seconds: float
    lines: int
    memory: int


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 of one that has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


class Lines:
    """Counts the lines of a file that grows; mutable."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._count = path, 0, 0

    def count(self) -> int:
        """Return how many lines there are now."""
        if self._path.exists():
            if self._path.stat().st_size < self._read:  # an incomplete line was removed
                self._read = self._count = 0
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
            self._read, self._count = self._read + len(new), self._count + new.count(b"\n")
        return self._count


def run(command: list[str], lines: Lines, kill_at: int | None) -> tuple[list[Sample], str]:
    """Run the command until it ends or has written ``kill_at`` lines; return samples from its first row on, and its output."""
    samples: list[Sample] = []
    before, begun = lines.count(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            time.sleep(0.05)
            count = lines.count()
            memory = resident_bytes(process.pid)
            if count > before and memory:
                samples.append(Sample(time.monotonic() - begun, count, memory))
            if kill_at is not None and count >= kill_at:
                process.kill()
                break
        output, _ = process.communicate()
    if kill_at is None and process.returncode:
        raise SystemExit(f"the command ended with status {process.returncode}")
    return samples, output


def row_of(samples: list[Sample], before: int) -> dict[str, Any]:
    """Return the printed line of a run."""
    first = samples[0]
    last = next(sample for sample in samples if sample.lines == samples[-1].lines)  # later samples are of the engine's shutdown
    half = next(sample for sample in samples if sample.lines >= (first.lines + last.lines) / 2)
    took = last.seconds - first.seconds
    return {
        "rows": last.lines - before,
        "rows_per_s": round((last.lines - first.lines) / took, 1) if took else None,
        "memory_mib": [sample.memory >> 20 for sample in (first, half, last)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=tiny_model())
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2, help="of each row (default: 2)")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    kills: list[int | None] = [*sorted(rng.randrange(1, args.rows) for _ in range(args.kills)), None]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        rows = ({"custom_id": f"row {i}", "prompt": f"def f{i}(", "max_tokens": args.tokens} for i in range(args.rows))
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            sys.executable,
            "-m",
            "dsv4lite",
            "batch",
            str(source),
            str(target),
            "--model",
            args.model,
            "--device",
            args.device,
        ]
        command += ["--max-num-seqs", str(args.max_num_seqs), "--max-model-len", "256", "--json"]
        runs, lines, output = [], Lines(target), ""
        for kill_at in kills:
            before = lines.count()
            samples, output = run(command, lines, None if kill_at is None else max(kill_at, before + 1))
            runs.append(row_of(samples, before))
            if not args.json:
                print(runs[-1], flush=True)
        found = [json.loads(line) for line in target.read_bytes().splitlines()]
    numbers = sorted(int(line["id"].removeprefix("row-")) for line in found)
    right = sum(line["custom_id"] == "row " + line["id"].removeprefix("row-") and line["error"] is None for line in found)
    result = {
        "missing": args.rows - len(set(numbers)),
        "twice": len(numbers) - len(set(numbers)),
        "wrong": len(found) - right,
        "summary": json.loads(output),
    }
    print(json.dumps({"runs": runs, **result}) if args.json else result)
    return 1 if result["missing"] or result["twice"] or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
