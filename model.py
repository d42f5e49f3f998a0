"""The Transformer: static KV cache, one forward for prefill chunks and decode steps.

Copy this file: it imports torch only. Names follow the Llama reference code, shapes are in
comments: N groups of T rows each (decode: N = B slots, T = 1 + k; prefill: N = 1, T = chunk), D =
dim, H = query heads, G = KV heads, E = head_dim, S = cache positions.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass
class ModelArgs:
    """Shape of a model, read from its own config.json or GGUF metadata; nothing is guessed from
    names.
    """

    dim: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    vocab_size: int = 256
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # as in config.json: {"rope_type": "linear", "factor": 2}
    max_position: int = 2048  # context length the model was trained for, in tokens
    tie_embeddings: bool = False


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:  # computed in float32 whatever the dtype of x
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def rope_frequencies(args: ModelArgs) -> Tensor:
    """Inverse frequencies [E / 2] float32, after the config's scaling (linear, llama3, or factors
    per frequency).
    """
    exponent = torch.arange(0, args.head_dim, 2, dtype=torch.float32) / args.head_dim
    inverse = 1.0 / args.rope_theta**exponent
    scaling = args.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return inverse / scaling["factor"]
    if scaling["rope_type"] == "factors":
        return inverse / torch.tensor(scaling["factors"], dtype=torch.float32)
    if scaling["rope_type"] == "llama3":  # long waves stretched, short kept, others blended
        length = scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = length * inverse / (2 * math.pi)  # full turns within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return blend * inverse + (1 - blend) * inverse / scaling["factor"]
    return inverse


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Half-split rotation: x [N, T, heads, E], rope [N, T, 1, E] float32, rows of `rope_table`."""
    (a, b), (cos, sin) = x.float().chunk(2, dim=-1), rope.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, window: int, scale: float
) -> Tensor:
    """Row (n, t) attends to the keys 0..positions[n, t] of slot slots[n].

    q [N, T, H, E]; k [B, G, S, 1, E], v [B, G, S, 1, E] (KVCache); positions [N, T], -1 for a
    padding row; slots [N] -> [N, T, H, E]. The query heads of a group are folded into rows, so that
    keys and values are never expanded.
    """
    k, v = k.flatten(2, 3), v.flatten(3)  # [B, G, S, E]
    (N, T, H, E), (B, G, S, _) = q.shape, k.shape
    if N != B:
        k, v = k[slots], v[slots]
    key = torch.arange(S, device=q.device)
    at = positions[:, :, None]
    mask = (key <= at) & (key > at - window) if window else key <= at
    mask |= (at < 0) & (key == 0)  # a padding row sees one key: no row may see none
    mask = mask.repeat(1, H // G, 1)[:, None]
    q = q.view(N, T, G, H // G, E).permute(0, 2, 3, 1, 4)
    q = q.reshape(N, G, -1, E).to(k.dtype)  # [N, G, H / G * T, E]
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return out.view(N, G, H // G, T, E).permute(0, 3, 1, 2, 4).reshape(N, T, H, E)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        rows = (args.n_head + 2 * args.n_kv_head) * args.head_dim
        self.wqkv = nn.Linear(args.dim, rows, bias=False)
        self.wo = nn.Linear(args.n_head * args.head_dim, args.dim, bias=False)
        self.attend = attend  # cpu_kernels.py puts its own here

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        args, (k_cache, v_cache, rope, positions, slots) = self.args, where
        heads = [args.n_head, args.n_kv_head, args.n_kv_head]
        qkv = self.wqkv(x).unflatten(-1, (-1, args.head_dim))  # [N, T, H + 2 G, E]
        q, k, v = qkv.split(heads, dim=2)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        # Position -1 (padding, frozen slots) wraps around to the last row of the cache, which
        # nobody reads.
        page, chunk = k_cache.shape[3], v_cache.shape[4]
        k_cache[slots[:, None], :, positions // page, positions % page] = k.to(k_cache.dtype)
        v_cache[slots[:, None], :, positions] = v.unflatten(-1, (-1, chunk)).to(v_cache.dtype)
        out = self.attend(q, k_cache, v_cache, positions, slots, 0, args.head_dim**-0.5)
        return self.wo(out.flatten(2).to(x.dtype))


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [gate, up]: [..., 2 I] -> [..., I]
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class FeedForward(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.activation = SwiGLU()
        self.w13 = nn.Linear(args.dim, 2 * args.intermediate_size, bias=False)  # gate and up in one
        self.w2 = nn.Linear(args.intermediate_size, args.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation(self.w13(x)))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention, self.feed_forward = Attention(args), FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    @torch.compiler.nested_compile_region  # compiled once for all layers, not unrolled
    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *where)
        return x + self.feed_forward(self.ffn_norm(x))


class KVCache:
    """Static keys and values of B slots, zeroed once, never reallocated. Per layer a pair of
    tensors, seen as

    keys [B, G, S / page, page, E], in memory [B, G, S / page, E, page]; values [B, G, S, E / chunk,
    chunk], in memory [B, G, E / chunk, S, chunk]. With page 1 and chunk E (model.kv_layout None)
    both are plain [B, G, S, E]; the CPU kernels want pages and chunks as wide as their vectors, so
    that both products of attention read along memory.
    """

    def __init__(
        self, model: "Transformer", batch_size: int, size: int, dtype: torch.dtype, device="cpu"
    ):
        args = model.args
        page, chunk = model.kv_layout or (1, args.head_dim)
        self.page, self.size = page, -(-size // page) * page
        B, G, E, S = batch_size, args.n_kv_head, args.head_dim, self.size
        self.layers = [
            (
                torch.zeros(B, G, S // page, E, page, dtype=dtype, device=device).transpose(3, 4),
                torch.zeros(B, G, E // chunk, S, chunk, dtype=dtype, device=device).transpose(2, 3),
            )
            for _ in range(args.n_layer)
        ]


class Transformer(nn.Module):
    """Decoder-only transformer. The caches live outside: one model can serve several."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layer))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.activation_dtype: torch.dtype | None = None  # None: that of the weights
        self.kv_dtype: torch.dtype | None = None  # None: that of the weights
        self.begin_step = lambda tokens, positions: tokens  # on CPU: skip rows of position -1
        self.kv_layout: tuple[int, int] | None = None  # (page, chunk) of KVCache

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, rope: Tensor, cache: KVCache,
        want_logits: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """Write the rows' keys and values into the cache and return their logits.

        tokens, positions [N, T] int64 (position -1: a padding row, logits meaningless); slots [N]
        int64: the cache row of each group; rope [S, E] float32 from rope_table; -> logits [N, T, V]
        float32, or None without `want_logits` (prefill fills the cache and needs none).
        """
        x = self.tok_embeddings(self.begin_step(tokens, positions))  # [N, T, D]
        x = x.to(self.activation_dtype or x.dtype)
        rope = rope[positions][:, :, None]  # [N, T, 1, E]
        for layer, kv in zip(self.layers, cache.layers):
            x = layer(x, *kv, rope, positions, slots)
        return self.output(self.norm(x)).float() if want_logits else None


def rope_table(args: ModelArgs, size: int, device="cpu") -> Tensor:
    """cos and sin of every position 0..size-1, [size, E] float32 (cos first). Angles in float64:
    long contexts.
    """
    angles = torch.arange(size, dtype=torch.float64)[:, None] * rope_frequencies(args).double()
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float().to(device)
