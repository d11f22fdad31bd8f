"""Computes matrix products on a card through every route that an engine has. Runs inside an image.

    python compute.py JOB

JOB is JSON: {"engine", "device", "products": [{"name", "n", "k", "format", "experts", "visited"}],
"tokens": [1, 16], "runs": 10, "of_result": 0.0039, "of_magnitudes": 0.00049}. Each result is a line
on standard output that begins with MARK, so that a crash loses only what comes after it.

Operands are drawn as quantised numbers, so the exact product of the very same numbers is known.
Needs numpy and torch, and of the engine's packages those that the image has.
"""

from __future__ import annotations

import importlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Json = dict[str, Any]
Array = NDArray[Any]
MARK = "SM120-PRODUCT "
_BLOCK = 128  # of FP8 with a scale for each block
_GROUP = 16  # of NVFP4
# CUTLASS takes FP4 matrices whose sides are multiples of this; engines fill up with zeros.
_FP4_ALIGNMENT = 32
_MOST_EXPERTS = 16  # a grouped product goes wrong with a few of them as with all
_LONGEST_MESSAGE = 300
_PACKAGES = ("torch", "vllm", "sglang", "sgl_kernel", "flashinfer", "numpy")


def _e4m3_values() -> Array:
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, (codes & 7) / 8
    normal = (1 + fraction) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, fraction * 2.0**-6, normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -values, values)


# The number for each byte of FP8: four bits of exponent, three of fraction, no infinity.
E4M3 = _e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Operand(NamedTuple):
    """A quantised matrix, and what it means."""

    codes: Array  # a byte for each number, of FP4 too
    scales: Array  # bytes of FP8 for NVFP4, else float32
    whole: float  # the scale of the whole matrix, by which NVFP4 divides
    values: Array


def make_operand(
    rng: np.random.Generator, kind: str, rows: int, k: int, *, weight: bool
) -> Operand:
    """Random numbers whose scales differ much, so that a scale in the wrong place is seen."""
    if kind == "nvfp4":
        if k % _GROUP:
            raise ValueError(f"{k} columns are no whole groups of {_GROUP}")
        codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
        # with the largest number in each group, an engine's own quantiser finds these very scales
        codes[:, ::_GROUP] |= 7
        scales = rng.integers(0x28, 0x48, (rows, k // _GROUP), dtype=np.uint8)  # 0.25 to 3.75
        if rows > 1:
            # 448, the largest: some kernels read it as NaN (sgl-project/sglang#22927)
            scales[-1] = 0x7E
        of_matrix = 8.0 if weight else 4.0
        values = E2M1[codes] * np.repeat(E4M3[scales], _GROUP, axis=1) / of_matrix
        return Operand(codes, scales, of_matrix, values)
    codes = rng.integers(0, 256, (rows, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] ^= 1  # NaN becomes the largest number
    shape = {
        "fp8-tensor": (1, 1),
        "fp8-channel": (rows, 1),
        "fp8-block": (_parts(rows, _BLOCK) if weight else rows, _parts(k, _BLOCK)),
    }[kind]
    scales = (2.0 ** rng.uniform(-4, 4, shape)).astype(np.float32)
    whole = scales.astype(np.float64)
    if kind == "fp8-block":
        whole = np.repeat(whole, _BLOCK, axis=1)[:, :k]
        whole = np.repeat(whole, _BLOCK, axis=0)[:rows] if weight else whole
    return Operand(codes, scales, 1.0, E4M3[codes] * whole)


def _parts(whole: int, size: int) -> int:
    return -(-whole // size)


def pack(codes: Array) -> Array:
    """Two FP4 numbers in a byte, the first one in the low half."""
    return np.ascontiguousarray(codes[:, ::2] | codes[:, 1::2] << 4)


def swizzle(scales: Array) -> Array:
    """Scales of NVFP4 as tensor cores read them: tiles of 128 rows and 4 columns."""
    rows, columns = _parts(scales.shape[0], 128) * 128, _parts(scales.shape[1], 4) * 4
    tiles = _filled(scales, rows, columns).reshape(rows // 128, 4, 32, columns // 4, 4)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns)


def _filled(array: Array, rows: int, columns: int) -> Array:
    return np.pad(array, ((0, rows - array.shape[0]), (0, columns - array.shape[1])))


def _measure(got: Array, want: Array, magnitudes: Array, job: Json) -> Json:
    """How far a result is from the exact one, and where it is too far."""
    finite = np.isfinite(got)
    error = np.abs(np.where(finite, got, want) - want)
    bound = job["of_result"] * np.abs(want) + job["of_magnitudes"] * magnitudes
    beyond = ~finite | (error > bound)
    units = error / np.maximum(bound, np.finfo(np.float64).tiny)
    zero = (got == 0).all(axis=1) & (want != 0).any(axis=1)
    found: Json = {
        "values": int(got.size),
        "nan": int(np.isnan(got).sum()),
        "infinite": int(np.isinf(got).sum()),
        "zero_rows": int(zero.sum()),
        "beyond": int(beyond.sum()),
        "worst": float(units.max(initial=0.0)),
    }
    for name, axis in (("rows", 1), ("columns", 0)):
        places = np.flatnonzero(beyond.any(axis=axis))
        found[name] = [int(places[0]), int(places[-1])] if places.size else None
    return found


def measure_runs(results: Sequence[Array], want: Array, magnitudes: Array, job: Json) -> Json:
    """The worst of several runs, and how many have not the bits of the first."""
    first = results[0]
    others = [each for each in results[1:] if each.tobytes() != first.tobytes()]
    measured = [_measure(each, want, magnitudes, job) for each in (first, *others)]
    worst = max(measured, key=lambda each: (each["beyond"], each["worst"]))
    return {**worst, "runs": len(results), "differing": len(others)}


class Refused(Exception):
    """An engine would not take this route with this shape."""


class Case:
    """One product at one number of tokens, as tensors of the card."""

    def __init__(self, torch: Any, device: str, kind: str, left: Operand, right: Operand) -> None:
        self.torch, self.device, self.kind, self.bf16 = torch, device, kind, torch.bfloat16
        self.left, self.right = left, right
        self.m, self.k = left.codes.shape
        self.n = right.codes.shape[0]
        self.padded_k, self.padded_n = (
            _parts(side, _FP4_ALIGNMENT) * _FP4_ALIGNMENT for side in (self.k, self.n)
        )

    def put(self, array: Array, dtype: str | None = None) -> Any:
        """An array on the card; bytes may be read as another type."""
        tensor = self.torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        return tensor.view(getattr(self.torch, dtype)) if dtype else tensor

    def fp8(self) -> tuple[Any, Any, Any, Any]:
        """Both matrices, the second as columns, and their scales."""
        a, b = (self.put(each.codes, "float8_e4m3fn") for each in (self.left, self.right))
        scales = [self.put(each.scales) for each in (self.left, self.right)]
        left, right = [x.view(1) for x in scales] if self.kind == "fp8-tensor" else scales
        return a, b.t(), left, right

    def fp4(self, scale_type: str | None = "float8_e4m3fn") -> tuple[Any, Any, Any, Any]:
        """Packed matrices and their scales, filled up as engines do it."""
        left, right, k, n = self.left, self.right, self.padded_k, self.padded_n
        return (
            self.put(pack(_filled(left.codes, self.m, k))),
            self.put(pack(_filled(right.codes, n, k))),
            self.put(swizzle(_filled(left.scales, self.m, k // _GROUP)), scale_type),
            self.put(swizzle(_filled(right.scales, n, k // _GROUP)), scale_type),
        )

    def alpha(self) -> Any:
        """What an FP4 product is multiplied by at the end."""
        return self.number(1.0 / (self.left.whole * self.right.whole))

    def number(self, value: float) -> Any:
        return self.torch.tensor([value], dtype=self.torch.float32, device=self.device)

    def unquantised(self) -> tuple[Any, Any]:
        """The first matrix before it is quantised, and its scale; bfloat16 holds it exactly."""
        x = self.put(self.left.values.astype(np.float32)).to(self.bf16)
        return x, self.number(self.left.whole)


class Experts:
    """Rows that are sorted by expert, and the weights of several experts."""

    def __init__(self, torch: Any, device: str, cases: Sequence[Case]) -> None:
        self.torch, self.device, self.cases = torch, device, cases
        self.m = sum(case.m for case in cases)
        self.n, self.k = cases[0].n, cases[0].k

    def fp4(self) -> tuple[Any, Any, Any, Any, Any]:
        """One matrix of all rows, a stack of weights, scales from whole tiles on, and alphas."""
        if self.n % _FP4_ALIGNMENT or self.k % _FP4_ALIGNMENT:
            raise Refused(f"{self.n} x {self.k} is not aligned to {_FP4_ALIGNMENT}")
        parts = [case.fp4(None) for case in self.cases]
        view, alphas = self.torch.float8_e4m3fn, self.torch.cat([c.alpha() for c in self.cases])
        a, left = (self.torch.cat([part[i] for part in parts]) for i in (0, 2))
        b, right = (self.torch.stack([part[i] for part in parts]) for i in (1, 3))
        return a, b, left.view(view), right.view(view), alphas

    def sizes(self) -> tuple[Any, Any, Any]:
        """The problem of each expert, its first row and the first row of its scales."""
        rows = [case.m for case in self.cases]
        tiles = [_parts(m, 128) * 128 for m in rows]
        starts = [[sum(each[:i]) for i in range(len(rows))] for each in (rows, tiles)]
        problems = [[m, self.n, self.k] for m in rows]
        return self.integers(problems), self.integers(starts[0]), self.integers(starts[1])

    def integers(self, values: Any, kind: str = "int32") -> Any:
        return self.torch.tensor(values, dtype=getattr(self.torch, kind), device=self.device)


class Route(NamedTuple):
    """A function of some package, and how an engine calls it."""

    name: str
    engines: str
    formats: tuple[str, ...]
    module: str  # several, where releases differ: the first that is there
    attribute: str
    prepare: Callable[[Any, Any], Any]
    is_grouped: bool = False


# Each call is the engine's own: vLLM 0.32.0 model_executor/kernels/linear and fused_moe/experts,
# SGLang 0.5.8.post1 and 0.5.23 layers/quantization, FlashInfer 0.6.1 to 0.7.2 gemm/gemm_base.py.
ROUTES: list[Route] = []
_PLAIN = ("fp8-tensor", "fp8-channel")
_BLOCKED, _FP4 = ("fp8-block",), ("nvfp4",)
_BOTH = "vllm sglang"
_VLLM, _SGL = "vllm._custom_ops", "sgl_kernel"
_VLLM_FP8 = "vllm.model_executor.layers.quantization.utils.fp8_utils"
_SGLANG_FP8 = "sglang.kernels.ops.gemm.fp8_kernel sglang.srt.layers.quantization.fp8_kernel"
_SGLANG_JIT = "sglang.kernels.ops.gemm.fp8_blockwise_gemm"
_Prepare = TypeVar("_Prepare", bound=Callable[[Any, Any], Any])


def _route(
    name: str,
    engines: str,
    formats: tuple[str, ...],
    module: str,
    attribute: str,
    is_grouped: bool = False,
) -> Callable[[_Prepare], _Prepare]:
    """Registers the function that prepares a call: what it returns is run several times."""

    def register(prepare: _Prepare) -> _Prepare:
        ROUTES.append(Route(name, engines, formats, module, attribute, prepare, is_grouped))
        return prepare

    return register


@_route("torch._scaled_mm", _BOTH, _PLAIN, "torch", "_scaled_mm")
def _torch_scaled_mm(function: Any, case: Case) -> Any:
    a, b, left, right = case.fp8()
    # a scale for each row: torch wants the second one as a row
    right = right.t() if case.kind == "fp8-channel" else right
    return lambda: function(a, b, scale_a=left, scale_b=right, out_dtype=case.bf16)


@_route("flashinfer bmm_fp8", _BOTH, _PLAIN[:1], "flashinfer", "bmm_fp8")
def _flashinfer_bmm_fp8(function: Any, case: Case) -> Any:
    a, b, left, right = case.fp8()
    return lambda: function(a[None], b[None], left, right, case.bf16, backend="cublas")[0]


@_route("sgl_kernel", "sglang", _PLAIN[1:], _SGL, "fp8_scaled_mm")
@_route("vllm cutlass", "vllm", _PLAIN, _VLLM, "cutlass_scaled_mm")
def _scaled_mm(function: Any, case: Case) -> Any:
    a, b, left, right = case.fp8()
    return lambda: function(a, b, left, right, case.bf16)


@_route("vllm cutlass", "vllm", _BLOCKED, _VLLM, "cutlass_scaled_mm")
def _block_scaled_mm(function: Any, case: Case, rows: int | None = None) -> Any:
    """Of CUTLASS: scales of activations lie column by column."""
    rows = rows or case.m
    a = case.put(_filled(case.left.codes, rows, case.k), "float8_e4m3fn")
    b = case.put(case.right.codes, "float8_e4m3fn")
    left = case.put(_filled(case.left.scales, rows, case.left.scales.shape[1]).T).t()
    right = case.put(case.right.scales)
    return lambda: function(a, b.t(), left, right.t(), case.bf16)[: case.m]


@_route("sglang jit", "sglang", _BLOCKED, _SGLANG_JIT, "fp8_blockwise_scaled_mm")
@_route("sgl_kernel", "sglang", _BLOCKED, _SGL, "fp8_blockwise_scaled_mm")
def _sglang_block_scaled_mm(function: Any, case: Case) -> Any:
    if case.n % _BLOCK or case.k % _BLOCK:
        raise Refused(f"SGLang takes Triton for {case.n} x {case.k}")
    # SGLang fills rows up to fours when it quantises
    return _block_scaled_mm(function, case, _parts(case.m, 4) * 4)


@_route("sglang triton", "sglang", _BLOCKED, _SGLANG_FP8, "w8a8_block_fp8_matmul_triton")
@_route("vllm triton", "vllm", _BLOCKED, _VLLM_FP8, "w8a8_triton_block_scaled_mm")
def _triton_block_mm(function: Any, case: Case) -> Any:
    a, b, left, right = case.fp8()
    return lambda: function(a, b.t(), left, right, [_BLOCK, _BLOCK], case.bf16)


@_route("sgl_kernel", "sglang", _FP4, _SGL, "cutlass_scaled_fp4_mm")
@_route("vllm cutlass", "vllm", _FP4, _VLLM, "cutlass_scaled_fp4_mm")
def _fp4_mm(function: Any, case: Case) -> Any:
    a, b, left, right = case.fp4()
    alpha = case.alpha()
    return lambda: function(a, b, left, right, alpha, case.bf16)[:, : case.n]


@_route("vllm quantised", "vllm", _FP4, _VLLM, "cutlass_scaled_fp4_mm")
def _vllm_quantised(function: Any, case: Case) -> Any:
    """With vLLM's own quantiser, whose padding once was not written (vllm-project/vllm#48898)."""
    _, b, _, right = case.fp4()
    (x, whole), alpha, k = case.unquantised(), case.alpha(), case.padded_k
    quantise = _attribute(_VLLM, "scaled_fp4_quant")

    def run() -> Any:
        a, left = quantise(x, whole, is_sf_swizzled_layout=True, backend="cutlass", padded_n=k)
        return function(a, b, left, right, alpha, case.bf16)[:, : case.n]

    return run


def _flashinfer_fp4_mm(function: Any, case: Case, backend: str) -> Any:
    # as vLLM hands them over: bytes to these two, FP8 to the others
    a, b, left, right = case.fp4(None if backend in ("cutlass", "cudnn") else "float8_e4m3fn")
    rest = (left, right.t(), case.alpha(), case.bf16)
    return lambda: function(a, b.t(), *rest, backend=backend)[:, : case.n]


for _backend in ("cutlass", "b12x", "cudnn"):
    _prepare = partial(_flashinfer_fp4_mm, backend=_backend)
    _route(f"flashinfer {_backend}", _BOTH, _FP4, "flashinfer", "mm_fp4")(_prepare)


@_route("flashinfer quantised", "sglang", _FP4, "flashinfer", "mm_fp4")
def _sglang_quantised(function: Any, case: Case) -> Any:
    """With FlashInfer's quantiser, as SGLang has it on this card."""
    if case.k % _FP4_ALIGNMENT:
        raise Refused(f"{case.k} columns are filled up after quantisation")
    _, b, _, right = case.fp4(None)
    (x, whole), alpha = case.unquantised(), case.alpha()
    quantise = _attribute("flashinfer", "fp4_quantize")

    def run() -> Any:
        a, left = quantise(x, whole)
        rest = (left, right.t(), alpha, case.bf16)
        return function(a, b.t(), *rest, backend="cutlass")[:, : case.n]

    return run


@_route("vllm cutlass experts", "vllm", _FP4, _VLLM, "cutlass_fp4_moe_mm", is_grouped=True)
def _vllm_experts(function: Any, experts: Experts) -> Any:
    operands, sizes, torch = experts.fp4(), experts.sizes(), experts.torch

    def run() -> Any:
        shape = (experts.m, experts.n)
        out = torch.empty(shape, dtype=torch.bfloat16, device=experts.device)
        function(out, *operands, *sizes)
        return out

    return run


@_route("sgl_kernel experts", "sglang", _FP4, _SGL, "cutlass_fp4_group_mm", is_grouped=True)
def _sgl_kernel_experts(function: Any, experts: Experts) -> Any:
    operands, (problems, offsets, tiles) = experts.fp4(), experts.sizes()
    count, bf16 = len(experts.cases), experts.torch.bfloat16
    params = {
        "ab_strides": experts.integers([experts.k] * count, "int64"),
        "c_strides": experts.integers([experts.n] * count, "int64"),
        "problem_sizes": problems,
        "expert_offsets": offsets,
        "blockscale_offsets": tiles,
    }
    return lambda: function(*operands, bf16, experts.device, params)


def _attribute(modules: str, name: str) -> Any:
    *others, last = modules.split()
    for module in others:
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError:
            continue
    return getattr(importlib.import_module(last), name)


class Bench:
    """A card, and what it is asked to compute."""

    def __init__(self, torch: Any, job: Json) -> None:
        self.torch, self.job, self.device = torch, job, str(job.get("device", "cuda"))

    def exact(self, left: Operand, right: Operand) -> tuple[Array, Array]:
        """The product in float64, and the one of the magnitudes."""
        a, b = (self.torch.from_numpy(x.values).to(self.device) for x in (left, right))
        return (a @ b.t()).cpu().numpy(), (a.abs() @ b.abs().t()).cpu().numpy()

    def attempt(self, route: Route, case: Any, want: Array, magnitudes: Array) -> Json:
        """One route: is it there, does it run, is it right?"""
        try:
            function = _attribute(route.module, route.attribute)
        except Exception as error:
            return {"outcome": "missing", "message": _short(error)}
        results: list[Array] = []
        try:
            run = route.prepare(function, case)
            for _ in range(self.job["runs"]):
                # NaN in the memory that is handed out next shows what a kernel does not write
                for size in (case.m * case.n * 2, case.m * case.k // 2, case.m * case.k // 16):
                    kind = {"dtype": self.torch.uint8, "device": self.device}
                    self.torch.full((max(size, 1),), 255, **kind)
                out = run()
                if tuple(out.shape) != (case.m, case.n):
                    raise Refused(f"gave {tuple(out.shape)} in place of {(case.m, case.n)}")
                results.append(out.float().cpu().numpy())
        except Exception as error:
            outcome = "refused" if self._works() else "crashed"
            return {"outcome": outcome, "message": _short(error)}
        return {"outcome": "computed", **measure_runs(results, want, magnitudes, self.job)}

    def _works(self) -> bool:
        """Whether the card still takes work: after a wrong address it does not."""
        try:
            return bool(self.torch.ones(1, device=self.device).item() == 1.0)
        except Exception:
            return False

    def results(self) -> Iterator[Json]:
        """Every product, number of tokens and route; ends where the card does."""
        for product in self.job["products"]:
            about = {"product": product["name"], "format": product["format"]}
            for route, tokens, case, exact in self._cases(product):
                result = self.attempt(route, case, *exact)
                yield {**about, "route": route.name, "tokens": tokens, **result}
                if result["outcome"] == "crashed":
                    return

    def _cases(self, product: Json) -> Iterator[tuple[Route, int, Any, Sequence[Array]]]:
        """Every route with its operands and the exact result: plain ones, then grouped ones."""
        kind, n, k = product["format"], product["n"], product["k"]
        known = [r for r in ROUTES if kind in r.formats and self.job["engine"] in r.engines.split()]
        rng = np.random.default_rng(zlib.crc32(f"{product['name']} {kind} {n} {k}".encode()))
        right = make_operand(rng, kind, n, k, weight=True)
        for tokens in self.job["tokens"]:
            left = make_operand(rng, kind, tokens, k, weight=False)
            case, exact = Case(self.torch, self.device, kind, left, right), self.exact(left, right)
            yield from ((route, tokens, case, exact) for route in known if not route.is_grouped)
        grouped = [route for route in known if route.is_grouped]
        count = min(product["experts"], _MOST_EXPERTS)
        if not count or not grouped:
            return
        weights = [make_operand(rng, kind, n, k, weight=True) for _ in range(count)]
        for tokens in self.job["tokens"]:
            # as many rows as that many tokens send to these experts; some may have none
            rows = max(1, round(tokens * product["visited"] * count))
            counts = np.bincount(rng.integers(0, count, rows), minlength=count)
            lefts = [make_operand(rng, kind, int(m), k, weight=False) for m in counts]
            pairs = list(zip(lefts, weights, strict=True))
            joined = [np.concatenate(x) for x in zip(*(self.exact(*p) for p in pairs), strict=True)]
            cases = [Case(self.torch, self.device, kind, *pair) for pair in pairs]
            experts = Experts(self.torch, self.device, cases)
            yield from ((route, tokens, experts, joined) for route in grouped)


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_MESSAGE]


def describe(torch: Any, device: str) -> Json:
    """The card and the packages, or why there is no card."""
    versions = {}
    for name in _PACKAGES:
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    if device == "cpu":
        return {"name": "cpu", "capability": "none", "versions": versions}
    try:
        major, minor = torch.cuda.get_device_capability()
        name = torch.cuda.get_device_name()
    except Exception as error:
        return {"no_card": _short(error)}
    return {"name": name, "capability": f"{major}.{minor}", "versions": versions}


def main(words: Sequence[str]) -> None:
    """Print the card, every result, and that it is done."""
    job = json.loads(words[0])
    torch = importlib.import_module("torch")

    def card() -> Json:
        return describe(torch, str(job.get("device", "cuda")))

    def say(what: str, value: Json) -> None:
        print(MARK + json.dumps({what: value}), flush=True)

    say("card", found := card())
    if "no_card" in found:
        return
    for result in Bench(torch, job).results():
        say("measured", result)
    # again: by now the packages are imported
    say("done", card())


if __name__ == "__main__":
    main(sys.argv[1:])
