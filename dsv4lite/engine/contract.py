"""The execution contract: everything besides tokens that determines the bits of a result, as plain data to compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dsv4lite.device import installed_version
from dsv4lite.layout import Layout
from dsv4lite.models.config import ModelConfig
from dsv4lite.weights.quant import Numerics

_NAMED = 4  # tensors in a difference
_DRAFTER = "mtp."  # its tensors change no probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionContract:
    """How one side computes. Sides with equal contracts and ``deterministic=True`` compute equal bits.

    Environment variables that change the instructions of the CPU's matrix library, such as ``MKL_CBWR``, change bits and are not
    recorded.

    Attributes:
        versions: Versions of the packages that compute.
        device: Name of the GPU, or instruction set of the CPU.
        numerics: Fields of ``Numerics``, and the layout of ranks.
        model: Digest of the model's config.
        kernels: Digest of the sources of this package's ops and models.
        weights: Checksums by official name, without the drafter's.
    """

    versions: Mapping[str, str]
    device: str
    numerics: Mapping[str, str]
    model: str
    kernels: str
    weights: Mapping[str, str]

    @classmethod
    def of(cls, model: ModelConfig, numerics: Numerics, layout: Layout, checksums: Mapping[str, str]) -> ExecutionContract:
        """Return the contract of this process.

        Args:
            checksums: Checksums of the weights, by official name.
        """
        device = numerics.device
        on_gpu = device.type == "cuda"
        fields = {name: str(value) for name, value in asdict(numerics).items() if name != "device"}
        package, sources = Path(__file__).parents[1], hashlib.sha256()
        for file in sorted((*package.glob("kernels/**/*.py"), *package.glob("models/**/*.py"))):
            sources.update(file.read_bytes())
        return cls(
            versions={
                "dsv4lite": installed_version("dsv4lite"),
                "torch": torch.__version__,
                "triton": installed_version("triton") if on_gpu else "none",
                "cuda": str(torch.version.cuda) if on_gpu else "none",
            },
            device=torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch._C._get_cpu_capability()}",
            numerics={"device": device.type, **fields, **{axis: str(size) for axis, size in asdict(layout).items()}},
            model=hashlib.sha256(repr(model).encode()).hexdigest()[:16],
            kernels=sources.hexdigest()[:16],
            weights={name: value for name, value in checksums.items() if not name.startswith(_DRAFTER)},
        )

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that are equal for equal contracts, to send instead of the contract."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def difference(self, other: ExecutionContract) -> str:
        """Return the differences, one per line; an empty string if the contracts are equal."""
        lines = []
        for name, ours in asdict(self).items():
            theirs = getattr(other, name)
            if name == "weights":
                changed = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
                if changed:
                    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
                    lines.append(f"weights: {len(changed)} of {len(ours)} tensors: {', '.join(changed[:_NAMED])}{more}")
            elif isinstance(ours, Mapping):
                pairs = [(key, ours.get(key), theirs.get(key)) for key in sorted({*ours, *theirs})]
                lines += [f"{name}.{key}: {mine} here, {its} there" for key, mine, its in pairs if mine != its]
            elif ours != theirs:
                lines.append(f"{name}: {ours} here, {theirs} there")
        return "\n".join(lines)
