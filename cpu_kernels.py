"""Builds cpu_kernels.cpp once, registers its operations with torch, puts them into a model.

Why not PyTorch's own kernels: a row's bits must not depend on how many other rows run beside it
(that is what makes speculative and plain decoding give the same tokens), and the few-row step must
read bf16 weights at memory speed also on CPUs without bf16 instructions. These kernels do both by
construction; see cpu_kernels.cpp.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from quantize import quantize

FLAGS = "-O3 -march=native -std=c++17 -ffp-contract=fast -fopenmp -shared -fPIC -Wno-psabi".split()
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


@lru_cache(maxsize=1)
def library(cache_dir: Path) -> ctypes.CDLL | None:
    """Compile cpu_kernels.cpp for this processor (3 s, once), load it; None if it cannot be."""
    source = Path(__file__).with_name("cpu_kernels.cpp")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    cpu = platform.machine() + platform.processor()
    if Path("/proc/cpuinfo").exists():  # a shared home folder may be seen by unlike processors
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu += next((x for x in lines if x.startswith("flags")), "")
    key = hashlib.sha256(source.read_bytes() + repr((FLAGS, compiler, cpu)).encode())
    target = cache_dir / f"kernels-{key.hexdigest()[:16]}.so"
    try:
        if not target.exists():
            if compiler is None:
                raise OSError("no C++ compiler found (g++ or clang++; set CXX)")
            cache_dir.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            try:
                command = [compiler, *FLAGS, str(source), "-o", str(partial)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise OSError((done.stderr.strip().splitlines() or ["unknown error"])[-1])
                os.replace(partial, target)
            finally:
                partial.unlink(missing_ok=True)
        return ctypes.CDLL(str(target))
    except OSError as e:
        text = f"notice: CPU kernels not built ({e}): slower, and identity at fixed k only"
        print(text, file=sys.stderr)
        return None


_ops = torch.library.Library("ngram_spec", "DEF")
_ops.define("linear(Tensor x, Tensor w, int n, Tensor? norm, float eps, bool swiglu) -> Tensor")
_ops.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor slots, int window, float scale)"
    " -> Tensor"
)
_ops.define(
    "qlinear(Tensor x, Tensor w, Tensor factors, int n, int bits, Tensor? norm, float eps,"
    " bool swiglu) -> Tensor"
)
_ops.define("begin_step(Tensor tokens, Tensor positions) -> Tensor")
_c: dict = {}  # C functions by name, filled by install()


def _linear(x: Tensor, w: Tensor, n: int, norm: Tensor | None, eps: float, swiglu: bool) -> Tensor:
    y = torch.empty((*x.shape[:-1], n), dtype=torch.float32)
    pointers = x.data_ptr(), w.data_ptr(), y.data_ptr()
    weight = None if norm is None else norm.data_ptr()
    _c[w.dtype](*pointers, y.numel() // n, w.numel() // n, n, weight, eps, swiglu)
    return y


def _qlinear(x, w, factors, n: int, bits: int, norm, eps: float, swiglu: bool) -> Tensor:
    y = torch.empty((*x.shape[:-1], n), dtype=torch.float32)
    pointers = x.data_ptr(), w.data_ptr(), factors.data_ptr(), y.data_ptr()
    sizes = y.numel() // n, w.shape[1] * 32 // bits, n, bits
    _c["qlinear"](*pointers, *sizes, None if norm is None else norm.data_ptr(), eps, swiglu)
    return y


def _attend(q, k, v, positions, slots, window: int, scale: float) -> Tensor:
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    N, T, H, E = q.shape
    pointers = [x.data_ptr() for x in (q, k, v, out, positions, slots)]
    _c["attend", k.dtype](*pointers, N, T, H, k.shape[1], v.shape[2], E, window, scale)
    return out


def _begin_step(tokens: Tensor, positions: Tensor) -> Tensor:
    """Let the linear layers skip the rows of position -1 (their outputs are 0) in the step that
    embeds the result. All of the step depends on the result, so nothing can run before.
    """
    _c["begin_step"](positions.contiguous().data_ptr(), positions.numel())
    return tokens.clone()


_ops.impl("begin_step", _begin_step, "CPU")
_ops.impl("linear", _linear, "CPU")
_ops.impl("qlinear", _qlinear, "CPU")
_ops.impl("attend", _attend, "CPU")
for name, fake in {
    "begin_step": lambda tokens, positions: torch.empty_like(tokens),
    "linear": lambda x, w, n, *rest: x.new_empty((*x.shape[:-1], n)),
    "qlinear": lambda x, w, factors, n, *rest: x.new_empty((*x.shape[:-1], n)),
    "attend": lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format),
}.items():
    torch.library.register_fake(f"ngram_spec::{name}", fake, lib=_ops)


def pack(weight: Tensor, block: int) -> Tensor:
    """[N, K] -> [N / block, K, block], in bf16 [N / block, K / 2, block, 2]: pairs of inputs."""
    N, K = weight.shape
    pair = (2,) if weight.dtype == torch.bfloat16 else ()
    return weight.reshape(N // block, block, -1, *pair).transpose(1, 2).contiguous()


def pack_codes(codes: Tensor, bits: int, block: int) -> Tensor:
    """[N, K] uint8 -> [N / block, K * bits / 32, block] int32: 4 codes of a column per lane, in
    int4 those 16 further on in the high halves of the bytes.
    """
    N, K = codes.shape
    if bits == 4:
        low, high = codes.view(N, K // 32, 2, 16).unbind(2)
        codes = low | high << 4
    codes = codes.reshape(N // block, block, -1, 4).transpose(1, 2)
    return codes.contiguous().view(torch.int32).squeeze(3)


class PackedLinear(nn.Module):
    """y = f(x) W^T in float32 from packed weights [N / block, K, block] (bits: 8 or 4 for quantized
    ones); f: identity, RMSNorm or SwiGLU.

    Norm and SwiGLU run inside the kernel, so that their bits, too, are the same eager or compiled,
    for any row count.
    """

    def __init__(self, linear, block: int, norm=None, swiglu: bool = False, bits: int = 0):
        super().__init__()
        self.n, self.bits, weight = linear.weight.shape[0], bits, linear.weight.data
        if bits:
            codes, factors = quantize(weight, bits)
            factors = factors.view(self.n // block, block, -1, 2).transpose(1, 2).contiguous()
            self.register_buffer("factors", factors.view(torch.int32).squeeze(3))
        packed = pack_codes(codes, bits, block) if bits else pack(weight, block)
        self.register_buffer("packed", packed)
        self.register_buffer("norm", norm.weight.data.float() if norm else None)
        self.f = norm.eps if norm else 0.0, swiglu

    def forward(self, x: Tensor) -> Tensor:  # [..., K] float32 (SwiGLU: 2 K) -> [..., N] float32
        x, ops = x.contiguous(), torch.ops.ngram_spec
        if self.bits:
            w = self.packed, self.factors, self.n, self.bits
            return ops.qlinear(x, *w, self.norm, *self.f)
        return ops.linear(x, self.packed, self.n, self.norm, *self.f)


class PackedEmbedding(nn.Module):
    """Rows of a packed weight: an embedding tied to the output layer needs no second copy."""

    def __init__(self, output: PackedLinear):
        super().__init__()
        self.output = output

    def forward(self, tokens: Tensor) -> Tensor:  # [N, T] int64 -> [N, T, K] float32
        packed, j = self.output.packed, tokens % self.output.packed.shape[2]
        if self.output.bits:
            at = tokens // packed.shape[2], slice(None), j
            step, low = self.output.factors[at].view(torch.float16).float().split(1, -1)
            return packed[at].view(torch.uint8).float() * step + low
        row = packed[tokens // packed.shape[2], :, j].float()
        return row.flatten(-2) if packed.dtype == torch.bfloat16 else row


def release_threads() -> None:
    """End the calling thread's OpenMP workers before another starts its own (cpu_kernels.cpp)."""
    if _c:
        _c["release_threads"]()


def install(model: nn.Module, cache_dir: Path, bits: int = 0) -> bool:
    """Replace a CPU model's linear layers and attention by the packed kernels, one layer at a time.

    bits: 0 to keep the weights, 8 or 4 to quantize them (the output layer to 8 bits in both).
    Returns whether it was done: not without a compiler, nor for shapes the kernels do not serve
    (all sizes multiples of 32, bfloat16 or float32), where torch's own operations stay.
    """
    linears = [x for x in model.modules() if isinstance(x, nn.Linear)]
    sizes = [n for x in linears for n in x.weight.shape] + [model.args.head_dim]
    dtype = linears[0].weight.dtype
    if any(n % 32 for n in sizes) or dtype not in SUFFIX:
        return False
    if (lib := library(cache_dir)) is None:
        return False
    p, i, f = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    for kind, suffix in SUFFIX.items():
        _c[kind], _c["attend", kind] = lib["linear_" + suffix], lib["attend_" + suffix]
        _c[kind].argtypes = [p] * 3 + [i] * 3 + [p, f, i]
        _c["attend", kind].argtypes = [p] * 6 + [i] * 7 + [f]
    for name in ("release_threads", "begin_step", "qlinear"):
        _c[name] = lib[name]
    _c["begin_step"].argtypes, _c["qlinear"].argtypes = [p, i], [p] * 4 + [i] * 4 + [p, f, i]
    block = lib.columns_per_block()

    def replace(parent: nn.Module, name: str, norm=None, swiglu: bool = False) -> None:
        linear = getattr(parent, name)
        b = 8 if bits and name == "output" else bits
        setattr(parent, name, PackedLinear(linear, block, norm, swiglu, b))
        linear.weight = None  # the unpacked weight goes before the next layer is packed

    for layer in model.layers:
        replace(layer.attention, "wqkv", layer.attention_norm)
        replace(layer.attention, "wo")
        replace(layer.feed_forward, "w13", layer.ffn_norm)
        replace(layer.feed_forward, "w2", swiglu=True)
        layer.attention_norm = layer.ffn_norm = layer.feed_forward.activation = nn.Identity()
        layer.attention.attend = torch.ops.ngram_spec.attend
    replace(model, "output", model.norm)
    model.norm = nn.Identity()
    if model.args.tie_embeddings:
        model.tok_embeddings = PackedEmbedding(model.output)
    model.begin_step = torch.ops.ngram_spec.begin_step
    model.activation_dtype, model.kv_dtype, model.kv_layout = torch.float32, dtype, (block, block)
    return True
