"""Weight-only formats of checkpoints: which tensors make up one matrix, and which numbers they stand for.

A ``QuantFormat`` describes one packing. ``QUANT_METHODS`` has this package's formats by the ``quant_method`` of ``config.json``;
``EngineConfig.quant_formats`` adds the host's own. The names of the tensors tell which matrices are packed, so lists such as
``ignore`` and ``modules_to_not_convert`` are not read.

All packings of int4 become one form, and so do those of NVFP4 (``kernels/four_bit``). On a GPU weights stay in this form; elsewhere
they are dequantized to float32 once, at load. Sources of the packings: AutoAWQ's GEMM version, AutoGPTQ and GPTQModel,
compressed-tensors' ``pack-quantized`` and ``nvfp4-pack-quantized``, ModelOpt's NVFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from dsv4lite.device import is_cuda_error, is_out_of_memory
from dsv4lite.errors import CheckpointError, ConfigError, DSV4LiteError, UnsupportedError, described, shown
from dsv4lite.kernels.four_bit import SCALE_DTYPES, FourBit, round_four_bit
from dsv4lite.kernels.quantize import unpack_fp4
from dsv4lite.parallel.shard import Cut
from dsv4lite.weights.checkpoint import DTYPES, Described, HeldTensor, Wanted

OUT, IN = 0, 1
_SCALES = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds each of its eight columns


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that make up a matrix ``[out, in]``.

    Attributes:
        leaf: Last component of its name: ``qweight`` of ``model.layers.0.mlp.up_proj.qweight``.
        dtypes: Accepted dtype codes of the file format, such as ``I32``.
        dims: For each dimension, the axis of the matrix, ``OUT`` or ``IN``, and the number of elements along this axis that one
            stored element covers; ``()`` is one number for the whole matrix.
        whole: Every rank reads all of it.
    """

    leaf: str
    dtypes: tuple[str, ...]
    dims: tuple[tuple[int, int], ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """How a checkpoint packs matrices.

    Attributes:
        name: Name in messages.
        parts: The tensors that make up a matrix; the first holds the codes, and has one dimension for each axis.
        read: Converts the parts of a matrix, or of a rank's cut of it, by leaf, to ``FourBit`` or to floats ``[out, in]``. Parts
            are on the model's device, and their memory may be reused later. Raises ``ValueError`` that says what is wrong.
        unread: Leaves of further tensors that are ignored.
        group: Inputs that share a scale, if ``read`` returns ``FourBit``; 0 if it returns floats.
        scales: Leaf of the part that these scales are made of.
        scale_dtype: Dtype code of these scales; by default, that of the part.
        quantize: Converts new weights, a rank's floats ``[out, in]``, to what ``read`` returns; ``None`` if updates must be packed.
    """

    name: str
    parts: tuple[Part, ...]
    read: Callable[[Mapping[str, Tensor]], FourBit | Tensor]
    unread: tuple[str, ...] = ()
    group: int = 0
    scales: str = ""
    scale_dtype: str = ""
    quantize: Callable[[Tensor], FourBit | Tensor] | None = None

    def __post_init__(self) -> None:
        leaves = [part.leaf for part in self.parts]
        if not self.parts or sorted(axis for axis, _ in self.parts[0].dims) != [OUT, IN]:
            raise ConfigError(
                f"QuantFormat {self.name!r}: the first of parts={leaves} must have a dimension for OUT and one for IN"
            )
        for part in self.parts:
            if any(axis not in (OUT, IN) or type(per) is not int or per < 1 for axis, per in part.dims):
                rule = "each must be (OUT or IN, an integer of at least 1)"
                raise ConfigError(f"QuantFormat {self.name!r}: part {part.leaf!r} has dims={shown(part.dims)}; {rule}")
        if self.group and self.scales not in leaves:
            raise ConfigError(
                f"QuantFormat {self.name!r}: scales={self.scales!r} with group={self.group}: it must be one of {leaves}"
            )
        if self.group and (wrong := sorted({shown(code) for code in self._scale_codes if DTYPES.get(code) not in SCALE_DTYPES})):
            known = ", ".join(code for code, dtype in DTYPES.items() if dtype in SCALE_DTYPES)
            raise ConfigError(f"QuantFormat {self.name!r}: scales in {', '.join(wrong)}; set scale_dtype to one of {known}")

    @property
    def _scale_codes(self) -> tuple[str, ...]:
        """Dtype codes that the scales of a ``FourBit`` may have."""
        return (self.scale_dtype,) if self.scale_dtype else next(part.dtypes for part in self.parts if part.leaf == self.scales)

    def make(self, call: Callable[[], FourBit | Tensor], shape: tuple[int, ...]) -> FourBit | Tensor:
        """Return what a call of ``read`` or ``quantize`` makes; raise ``ValueError`` unless it is a matrix of this shape."""
        try:
            made: object = call()
        except Exception as error:
            if isinstance(error, ValueError | MemoryError) or is_out_of_memory(error) or is_cuda_error(error):
                raise
            raise ValueError(f"the format {self.name!r} failed: {described(error)}") from error
        of_kind = isinstance(made, FourBit) or (isinstance(made, Tensor) and made.is_floating_point() and made.itemsize > 1)
        if isinstance(made, FourBit | Tensor) and of_kind and tuple(made.shape) == shape:
            if isinstance(made, FourBit):
                self._check_scales(made)
            return made
        wanted = f"floats {list(shape)}, or a FourBit of this shape"
        raise ValueError(f"the format {self.name!r} made {_kind(made)}; it must make {wanted}")

    def _check_scales(self, made: FourBit) -> None:
        """Require scales and offsets of the format's groups: others would be broadcast, or read by a kernel beyond their end."""
        if not self.group:
            raise ValueError(f"the format {self.name!r} made a FourBit with group=0; set group and scales of the QuantFormat")
        *rows, inputs = made.shape
        scales = (*rows, inputs // self.group)
        offsets = ((*rows, 1), torch.float32) if made.nvfp4 else (scales, torch.uint8)
        if made.scales.dtype not in map(DTYPES.get, self._scale_codes) or made.scales.shape != scales or inputs % self.group:
            rule = f"{list(scales)} in {' or '.join(self._scale_codes)}, for group={self.group}"
            raise ValueError(f"the format {self.name!r} made scales {_kind(made.scales)}; they must be {rule}")
        if not isinstance(made.offsets, Tensor) or (made.offsets.shape, made.offsets.dtype) != offsets:
            rule = f"{offsets[1]} {list(offsets[0])}"
            raise ValueError(f"the format {self.name!r} made offsets {_kind(made.offsets)}; they must be {rule}")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of which each cut between ranks must be a multiple."""
        per = [[step for part in self.parts for at, step in part.dims if at == axis] for axis in (OUT, IN)]
        return lcm(*per[OUT]), lcm(*per[IN])

    def owns(self, name: str, info: Described) -> bool:
        """Return whether a tensor is a part of a packed matrix, or ignored. A ``weight`` of another dtype is an unpacked matrix."""
        leaf = name.rpartition(".")[2]
        whole = leaf == "weight" and all(info.dtype not in part.dtypes for part in self.parts if part.leaf == leaf)
        return leaf in self.unread or (not whole and any(part.leaf == leaf for part in self.parts))

    def scale_code(self, tensors: Iterable[Header]) -> str:
        """Return the dtype code of the packed matrices' scales: ``F32`` if they differ, the format's first one for none."""
        if self.scale_dtype or not self.group:
            return self.scale_dtype or "F32"
        found = {info.parts[self.scales].dtype for info in tensors if isinstance(info, PackedTensor)}
        if len(found) > 1:
            return "F32"
        return found.pop() if found else self._scale_codes[0]


QuantMethod = Callable[[Mapping[str, Any]], QuantFormat]
"""Returns the format for a ``quantization_config``; raises ``ConfigError`` or ``UnsupportedError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A matrix made up of several tensors, described as ``TensorInfo`` describes one tensor.

    Attributes:
        name: Official name, ``X.weight``.
        shape: ``(out, in)``, before packing.
        parts: Its tensors by leaf.
    """

    name: str
    format: QuantFormat
    shape: tuple[int, ...]
    parts: Mapping[str, Described]

    @property
    def dtype(self) -> str:
        """Name of the format, in place of a dtype code."""
        return self.format.name

    def cut(self, cut: Cut) -> PackedCut:
        """Return a part of it, one slice per dimension in elements of the matrix; without slices all of it."""
        found = {}
        for part in self.format.parts:
            dims = part.dims if cut and not part.whole else ()
            places = tuple(slice(cut[axis].start // per, -(-cut[axis].stop // per)) for axis, per in dims)
            found[part.leaf] = self.parts[part.leaf].cut(places)
        return PackedCut(self, found)


Header = Described | PackedTensor
"""A tensor of a checkpoint, or several that make up one matrix."""


@dataclass(frozen=True, slots=True)
class PackedCut:
    """A rank's part of a packed matrix: the part to read of each tensor, by leaf."""

    info: PackedTensor
    parts: Mapping[str, Wanted | HeldTensor]

    def read(self, tensors: Mapping[str, Tensor]) -> FourBit | Tensor:
        """Return the matrix, floats [out, in] or a ``FourBit``, given the tensors by leaf.

        Raises:
            CheckpointError: The format cannot read them.
        """
        form = self.info.format
        try:
            made = form.make(partial(form.read, tensors), _shape(form.parts[0], tensors))
            if isinstance(made, FourBit) and not (_finite(made.scales) and _finite(made.offsets)):
                wrong = [leaf for leaf, tensor in tensors.items() if not _finite(tensor)]
                raise ValueError(f"{' and '.join(wrong) or 'its scales'} must be finite numbers, but some are infinite or NaN")
            return made
        except ValueError as error:
            raise CheckpointError("a packed matrix cannot be read:", problems=[f"{self.info.name}: {error}"]) from error


def _finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite. It reads e4m3 as bytes: conversion to float32 takes 40 times as long."""
    if numbers.dtype == torch.float8_e4m3fn:
        return not bool((numbers.view(torch.int8) & 0x7F == 0x7F).any())  # NaN; there is no infinity
    return not numbers.is_floating_point() or bool(numbers.float().abs().amax().isfinite())


def find_format(raw: Mapping[str, Any], given: Mapping[str, QuantMethod]) -> QuantFormat | None:
    """Return the weight-only format of a ``config.json``; ``None`` if it has none, or block FP8, which families read themselves.

    Args:
        given: The host's own methods, which override this package's.

    Raises:
        ConfigError, UnsupportedError: The method is unknown, its settings are invalid, or the variant is not supported.
    """
    quantization, methods = raw.get("quantization_config"), {**QUANT_METHODS, **given}
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") in (None, "fp8"):
        return None
    method = quantization["quant_method"]
    if not isinstance(method, str) or method not in methods:
        known = ", ".join(("fp8", *methods))
        raise UnsupportedError(f"{_method(quantization)} is not supported (known: {known}); set quant_formats for others")
    try:
        form = methods[method](quantization)
    except DSV4LiteError:
        raise
    except Exception as error:
        raise ConfigError(f"quant_formats: the function for {_method(quantization)} failed: {described(error)}") from error
    if not isinstance(form, QuantFormat):
        raise ConfigError(f"quant_formats: the function for {_method(quantization)} returned {shown(form)}, not a QuantFormat")
    return form


def assemble(headers: Mapping[str, Described], form: QuantFormat) -> tuple[dict[str, Header], dict[str, list[str]], list[str]]:
    """Put the tensors of each packed matrix together.

    Returns:
        Unpacked tensors and complete packed matrices, by official name; the missing leaves of each incomplete matrix, by its name;
        and a line for each problem.
    """
    found: dict[str, Header] = {}
    groups: dict[str, dict[str, Described]] = {}
    for name, info in headers.items():
        owner, _, leaf = name.rpartition(".")
        if not form.owns(name, info):
            found[name] = info
        elif leaf not in form.unread:
            groups.setdefault(owner, {})[leaf] = info
    incomplete: dict[str, list[str]] = {}
    problems: list[str] = []
    for owner, parts in groups.items():
        name, missing = f"{owner}.weight", [part.leaf for part in form.parts if part.leaf not in parts]
        if missing:
            incomplete[name] = missing
            continue
        wrong = [f"{name}: given twice, packed and not"] if name in found else _misfits(form, parts)
        problems += wrong
        if not wrong:
            found[name] = PackedTensor(name=name, format=form, shape=_shape(form.parts[0], parts), parts=parts)
    return found, incomplete, problems


def _kind(given: object) -> str:
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else shown(given)


def _shape(part: Part, parts: Mapping[str, Described] | Mapping[str, Tensor]) -> tuple[int, int]:
    sizes = {axis: size * per for size, (axis, per) in zip(parts[part.leaf].shape, part.dims, strict=True)}
    return sizes[OUT], sizes[IN]


def _misfits(form: QuantFormat, parts: Mapping[str, Described]) -> list[str]:
    """Return the problems of the dtypes and shapes of a matrix's parts."""
    problems = []
    for part in form.parts:
        info = parts[part.leaf]
        if info.dtype not in part.dtypes:
            problems.append(f"{info.name}: dtype {info.dtype}, expected {' or '.join(part.dtypes)} ({form.name})")
        if not part.dims:
            if prod(info.shape) != 1:
                problems.append(f"{info.name}: shape {list(info.shape)}, expected one number ({form.name})")
        elif len(info.shape) != len(part.dims):
            problems.append(f"{info.name}: shape {list(info.shape)}, expected {len(part.dims)} dimensions ({form.name})")
    if problems:
        return problems
    shape = _shape(form.parts[0], parts)
    for part in form.parts[1:]:
        expected = [shape[axis] / per for axis, per in part.dims]
        if part.dims and list(parts[part.leaf].shape) != expected:
            whole = [int(size) if size == int(size) else size for size in expected]
            rule = " x ".join(f"{per} {('rows', 'inputs')[axis]}" for axis, per in part.dims)
            info = parts[part.leaf]
            problems.append(
                f"{info.name}: shape {list(info.shape)}, expected {whole}: one for {rule} of a matrix {list(shape)}; "
                f"check the group size in quantization_config ({form.name})"
            )
    return problems


# ------------------------------------------------------------------------------------------------------------------ int4


def _int4(quantization: Mapping[str, Any], key: str = "bits", **wanted: object) -> int:
    """Return the group size of a config; raise unless it has 4 bits and, where present, the values in ``wanted``."""
    for name, value in {key: 4, **wanted}.items():
        if quantization.get(name, value) != value:
            given = shown(quantization[name])
            raise UnsupportedError(f"{_method(quantization)} with {name}={given} is not supported; it must be {value!r}")
    group = quantization.get("group_size", 128)
    if type(group) is not int or group < 8 or group % 8:
        raise UnsupportedError(
            f"{_method(quantization)} with group_size={shown(group)} is not supported; it must be a multiple of 8"
        )
    return group


def _method(quantization: Mapping[str, Any]) -> str:
    return f"quantization_config.quant_method={shown(quantization.get('quant_method'))}"


def _nibbles(words: Tensor, dim: int) -> Tensor:
    """Return uint8 [.., 8 n, ..]: each int32 along ``dim`` is replaced by its eight nibbles, the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    spread = words.movedim(dim, -1)[..., None] >> shifts & 15
    return spread.to(torch.uint8).flatten(-2).movedim(-1, dim)


def awq(quantization: Mapping[str, Any]) -> QuantFormat:
    """AutoAWQ's GEMM packing: ``qweight`` int32 [in, out / 8], ``qzeros`` [in / group, out / 8], ``scales`` [in / group, out].

    In codes and zero points, columns 0 to 7 of a word are its nibbles 0, 4, 1, 5, 2, 6, 3, 7. ``w = (q - z) * s``.
    """
    given = quantization.get("version")
    group = _int4(quantization, version=given if str(given).lower() == "gemm" else "gemm")  # AutoAWQ ignores its case

    def columns(words: Tensor) -> Tensor:
        nibbles: Tensor = _nibbles(words, 1).unflatten(1, (-1, 8))
        return nibbles[..., list(_AWQ_ORDER)].flatten(1).t()

    def read(parts: Mapping[str, Tensor]) -> FourBit:
        codes, zeros = columns(parts["qweight"]), columns(parts["qzeros"])
        return FourBit.pack(codes, parts["scales"].t(), zeros)

    packed, scales = (("qweight", 1), ("qzeros", group)), Part("scales", _SCALES, ((IN, group), (OUT, 1)))
    words = (Part(leaf, ("I32",), ((IN, per), (OUT, 8))) for leaf, per in packed)
    return QuantFormat(name="AWQ", parts=(*words, scales), read=read, group=group, scales="scales")


def gptq(quantization: Mapping[str, Any]) -> QuantFormat:
    """AutoGPTQ's packing: ``qweight`` int32 [in / 8, out], ``qzeros`` [in / group, out / 8], ``scales``, ``g_idx`` [in].

    The nibbles of a word are in order. ``w = (q - z) * s``; ``checkpoint_format: gptq``, the default, stores ``z - 1`` in four
    bits, and ``gptq_v2`` stores ``z``. ``g_idx`` is the group of each input: any order but 0, 0, …, 1, 1, … is refused.
    """
    group = _int4(quantization)
    if quantization.get("desc_act") and not quantization.get("static_groups"):
        raise UnsupportedError("quantization_config.desc_act=True is not supported: quantize without, or with static_groups=True")
    version = quantization.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise UnsupportedError(f"quantization_config.checkpoint_format={shown(version)}: known are 'gptq' and 'gptq_v2'")

    def read(parts: Mapping[str, Tensor]) -> FourBit:
        codes, zeros, order = _nibbles(parts["qweight"], 0).t(), _nibbles(parts["qzeros"], 1).t(), parts["g_idx"]
        if not torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=order.device) // group):
            raise ValueError(f"g_idx is not in the order of the inputs, {group} to a group; quantize with desc_act=False")
        return FourBit.pack(codes, parts["scales"].t(), zeros if version == "gptq_v2" else zeros + 1 & 15)

    parts = (
        Part("qweight", ("I32",), ((IN, 8), (OUT, 1))),
        Part("qzeros", ("I32",), ((IN, group), (OUT, 8))),
        Part("scales", _SCALES, ((IN, group), (OUT, 1))),
        Part("g_idx", ("I32", "I64"), ((IN, 1),), whole=True),  # a cut does not tell at which group it begins
    )
    return QuantFormat(name="GPTQ", parts=parts, read=read, group=group, scales="scales")


def compressed_tensors(quantization: Mapping[str, Any]) -> QuantFormat:
    """compressed-tensors' ``pack-quantized`` int4, and ``nvfp4-pack-quantized``.

    int4: ``weight_packed`` int32 [out, in / 8], nibbles in order, each 8 more than the signed code; ``weight_scale``
    [out, in / group]; asymmetric weights have ``weight_zero_point`` int32 [out / 8, in / group], packed in the same way.
    ``w = (q - z) * s``. NVFP4: ``weight_packed`` uint8, ``weight_scale`` e4m3, ``weight_global_scale`` g in float32, ``m = 1 / g``.
    """
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise UnsupportedError(f"quantization_config.config_groups={shown(groups)} is not supported; one group of weights is")
    (only,) = groups.values()
    weights = only.get("weights") if isinstance(only, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UnsupportedError("quantization_config.config_groups: its group has no weights")
    weights = {"quant_method": "compressed-tensors", **weights}
    kind = quantization.get("format")
    if kind == "nvfp4-pack-quantized":
        return _nvfp4("NVFP4 of compressed-tensors", "weight_packed", "weight_global_scale", divides=True)
    if kind != "pack-quantized":
        raise UnsupportedError(
            f"quantization_config.format={shown(kind)} is not supported; known are 'pack-quantized' and 'nvfp4-pack-quantized'"
        )
    group = _int4(weights, "num_bits", type="int", strategy="group")
    if weights.get("actorder") not in (None, "static", "weight"):  # these keep groups in the order of the inputs
        raise UnsupportedError(f"quantization_config: actorder={shown(weights['actorder'])} is not supported; 'static' is")
    packed = Part("weight_packed", ("I32",), ((OUT, 1), (IN, 8)))
    scales = Part("weight_scale", _SCALES, ((OUT, 1), (IN, group)))
    zeros = Part("weight_zero_point", ("I32",), ((OUT, 8), (IN, group)))
    symmetric = weights.get("symmetric", True) is True

    def read(parts: Mapping[str, Tensor]) -> FourBit:
        codes, scale = _nibbles(parts["weight_packed"], 1), parts["weight_scale"]
        if symmetric:
            return FourBit.pack(codes, scale, torch.full_like(scale, 8, dtype=torch.uint8))
        return FourBit.pack(codes, scale, _nibbles(parts["weight_zero_point"], 0))

    return QuantFormat(
        name="int4 of compressed-tensors",
        parts=(packed, scales) if symmetric else (packed, scales, zeros),
        read=read,
        unread=("weight_shape",),
        group=group,
        scales="weight_scale",
        quantize=partial(round_four_bit, group=group, scale_dtype=torch.bfloat16) if symmetric else None,
    )


# ----------------------------------------------------------------------------------------------------------------- NVFP4


def modelopt(quantization: Mapping[str, Any]) -> QuantFormat:
    """ModelOpt's NVFP4: ``weight`` uint8 [out, in / 2], ``weight_scale`` e4m3 [out, in / 16], ``weight_scale_2`` m float32."""
    algorithm = quantization.get("quant_algo")
    if algorithm != "NVFP4":
        raise UnsupportedError(f"quantization_config.quant_algo={shown(algorithm)} is not supported; ModelOpt's 'NVFP4' is")
    return _nvfp4("NVFP4 of ModelOpt", "weight", "weight_scale_2", divides=False)


def _nvfp4(name: str, codes: str, factor: str, *, divides: bool) -> QuantFormat:
    """Return a weight-only NVFP4 format; scales of activations and KV rows are ignored."""

    def read(parts: Mapping[str, Tensor]) -> FourBit:
        rows, whole = parts[codes], parts[factor].reshape(1, 1)
        factors = (1 / whole if divides else whole).expand(len(rows), 1)
        return FourBit.pack(unpack_fp4(rows), parts["weight_scale"], factors)

    parts = (
        Part(codes, ("U8",), ((OUT, 1), (IN, 2))),
        Part("weight_scale", ("F8_E4M3",), ((OUT, 1), (IN, 16))),
        Part(factor, ("F32",)),
    )
    unread = ("input_global_scale", "input_scale", "k_scale", "v_scale")
    return QuantFormat(name=name, parts=parts, read=read, unread=unread, group=16, scales="weight_scale")


PACKED_LEAVES = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"),
    *("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale", "k_scale", "v_scale"),
)
"""Of the formats below, but for ``weight``."""
QUANT_METHODS: Mapping[str, QuantMethod] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
}
"""Methods by the ``quant_method`` of ``quantization_config``."""
