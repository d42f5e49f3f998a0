"""int8 and int4 weights. Imports torch only.

A weight is step * code + low. int8: one step per output row, symmetric (low = -128 step). int4: one
step and low per 32 inputs, which is GGUF's Q4_1, so that such files come back as they were.
"""

import torch
import torch.nn as nn
from torch import Tensor

BITS = {"none": 0, "int8": 8, "int4": 4}
GROUP = 32  # weights of a row that share an int4 step


def quantize(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[N, K] floats -> codes [N, K] uint8, factors [N, groups, 2] float16: (step, low).

    bits: 8 (groups = 1) or 4 (groups = K / 32). ValueError if K is not a multiple of 32.
    """
    N, K = weight.shape
    if K % GROUP:
        raise ValueError(f"the weight has {K} columns: quantization needs a multiple of {GROUP}")
    w = weight.float().view(N, -1, K if bits == 8 else GROUP)
    if bits == 8:
        step = (w.abs().amax(2) / 127).half().clamp(min=2.0**-24)
        low = -128 * step
    else:
        low = w.amin(2).half()
        step = ((w.amax(2) - w.amin(2)) / 15).half().clamp(min=2.0**-24)
    codes = ((w - low[..., None].float()) / step[..., None].float()).round()
    return codes.clamp(0, 2**bits - 1).view(N, K).to(torch.uint8), torch.stack([step, low], 2)


def dequantize(codes: Tensor, factors: Tensor) -> Tensor:
    """The weight [N, K] float32 that the codes stand for."""
    (step, low), (N, K) = factors.float().unbind(2), codes.shape
    w = codes.view(N, step.shape[1], -1).float() * step[..., None] + low[..., None]
    return w.view(N, K)


class QuantizedLinear(nn.Module):
    """y = x W^T by torch's own weight-only products, which read the codes as they are: for CUDA,
    and for CPUs without a C++ compiler (elsewhere cpu_kernels.py has faster ones).
    """

    def __init__(self, linear: nn.Module, bits: int):
        super().__init__()
        codes, factors = quantize(linear.weight.data, bits)
        self.n, self.bits, self.dtype = len(codes), bits, linear.weight.dtype
        if bits == 8:
            packed, scale = (codes.short() - 128).to(torch.int8), factors[:, 0, 0]
        else:  # w = (code - 8) * scale + zero
            step, low = factors.float().unbind(2)
            scale = torch.stack([step, low + 8 * step], 2).transpose(0, 1).contiguous()
            if codes.is_cuda:
                pairs = codes[:, ::2] << 4 | codes[:, 1::2]
                packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
            else:
                packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale.to(self.dtype))

    def forward(self, x: Tensor) -> Tensor:  # [..., K] -> [..., N]
        rows = x.reshape(-1, x.shape[-1])
        if self.bits == 8:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.packed, self.scale)
        elif x.is_cuda:
            y = torch.ops.aten._weight_int4pack_mm(rows, self.packed, GROUP, self.scale)
        else:
            op = torch.ops.aten._weight_int4pack_mm_for_cpu
            y = op(rows, self.packed, GROUP, self.scale)
        return y.view(*x.shape[:-1], self.n)


def quantize_linears(model: nn.Module, bits: int) -> None:
    """Replace a model's linear layers, one at a time; the output layer keeps 8 bits, and a tied
    embedding its floats.
    """
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear):
            parent, _, child = name.rpartition(".")
            layer = QuantizedLinear(linear, 8 if name == "output" else bits)
            setattr(model.get_submodule(parent), child, layer)
            linear.weight = None
