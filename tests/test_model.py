"""Logits against transformers, and against themselves: cached, chunked, packed, compiled."""

import pytest
import torch
from conftest import TINY, tiny_model

from cpu_kernels import PackedLinear, pack
from model import KVCache, ModelArgs, Transformer, rope_table

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@torch.no_grad()
def logits_of(model, tokens, chunks, dtype=None, batch=1, slot=0, size=128):
    """Logits [1, sum(chunks), V], computed chunk by chunk in one slot of a cache of `batch`
    slots.
    """
    dtype = dtype or next(t.dtype for t in [*model.parameters(), *model.buffers()] if t.dim() > 1)
    cache, at, out = KVCache(model, batch, size, dtype), 0, []
    rope = rope_table(model.args, size)
    for n in chunks:
        positions = torch.arange(at, at + n)[None]
        out.append(model(tokens[:, at : at + n], positions, torch.tensor([slot]), rope, cache))
        at += n
    return torch.cat(out, 1)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("heads, tied", [((4, 4), False), ((6, 2), True), ((8, 2), False)])
def test_logits_equal_transformers(heads, tied, scaling):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=192, num_hidden_layers=2, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32,
        intermediate_size=96, vocab_size=96, rms_norm_eps=1e-5, tie_word_embeddings=tied, max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **(SCALINGS[scaling] or {"rope_type": "default"})},
    )  # fmt: skip
    theirs = LlamaForCausalLM(config).eval()
    args = ModelArgs(**{
        **TINY, "dim": 192, "n_head": heads[0], "n_kv_head": heads[1], "vocab_size": 96, "rope_scaling": SCALINGS[scaling],
        "tie_embeddings": tied,
    })  # fmt: skip
    ours, w = Transformer(args).eval(), theirs.state_dict()
    state = {
        "tok_embeddings.weight": w["model.embed_tokens.weight"],
        "norm.weight": w["model.norm.weight"],
    }
    state["output.weight"] = w["lm_head.weight"]
    for i in range(2):
        p, q = f"model.layers.{i}.", f"layers.{i}."
        state[q + "attention.wqkv.weight"] = torch.cat(
            [w[p + f"self_attn.{x}_proj.weight"] for x in "qkv"]
        )
        state[q + "attention.wo.weight"] = w[p + "self_attn.o_proj.weight"]
        state[q + "feed_forward.w13.weight"] = torch.cat(
            [w[p + f"mlp.{x}_proj.weight"] for x in ("gate", "up")]
        )
        state[q + "feed_forward.w2.weight"] = w[p + "mlp.down_proj.weight"]
        state[q + "attention_norm.weight"] = w[p + "input_layernorm.weight"]
        state[q + "ffn_norm.weight"] = w[p + "post_attention_layernorm.weight"]
    ours.load_state_dict(state)
    tokens = torch.randint(0, 96, (1, 50))
    expected = theirs(tokens).logits
    for chunks in ([50], [16, 16, 18], [1] * 50):
        assert (logits_of(ours, tokens, chunks) - expected).abs().max() < 1e-4
    import cpu_kernels
    from checkpoint import cache_dir

    assert cpu_kernels.install(ours.requires_grad_(False), cache_dir())
    assert (logits_of(ours, tokens, [50], torch.float32) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", range(1, 65))
def test_linear_kernel_gives_a_row_the_same_bits_among_any_others(dtype, n):
    """Shape invariance per kernel: the property behind level two. Row 0's bits over row counts
    1..64 and positions.
    """
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160, bias=False).to(dtype).requires_grad_(False)
    norm = torch.nn.RMSNorm(96, eps=1e-5)
    for packed in (PackedLinear(linear, block(), norm), PackedLinear(linear, block(), swiglu=True)):
        x = torch.randn(64, 96 * (1 + packed.f[1]))
        one = torch.cat([packed(row[None]) for row in x])
        assert torch.equal(packed(x[:n]), one[:n])
        assert torch.equal(packed(x[64 - n :]), one[64 - n :])


def block() -> int:
    import cpu_kernels
    from checkpoint import cache_dir

    tiny_model()  # loads the kernels
    return cpu_kernels.library(cache_dir()).columns_per_block()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_kernel_equals_float64(dtype):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 160, bias=False).to(dtype).requires_grad_(False)
    x = torch.randn(7, 96)
    got = PackedLinear(linear, block())(x)
    assert (got - x.double() @ linear.weight.double().T).abs().max() < 1e-5
    x = torch.randn(7, 192)
    want = (
        torch.nn.functional.silu(x[:, :96].double()) * x[:, 96:].double()
    ) @ linear.weight.double().T
    assert (PackedLinear(linear, block(), swiglu=True)(x) - want).abs().max() < 1e-5
    assert pack(linear.weight, block()).numel() == linear.weight.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_chunk_batch_and_slot(dtype):
    """Shape invariance of the whole model: chunk offsets, row counts, live lengths, batch sizes,
    slots.
    """
    model, tokens = tiny_model(dtype), torch.randint(0, 64, (1, 100))
    whole = logits_of(model, tokens, [100])
    for chunks in ([1] * 100, [2] * 50, [6] * 16 + [4], [64, 36], [37, 63], [3, 97]):
        for batch, slot in ((1, 0), (3, 2), (8, 5)):
            assert torch.equal(logits_of(model, tokens, chunks, batch=batch, slot=slot), whole), (
                chunks,
                batch,
            )


@torch.no_grad()
def test_padding_rows_and_batch_mates_leave_a_row_alone():
    """Junk in other slots and rows of position -1 change no bit of a row's logits."""
    model = tiny_model(torch.bfloat16)
    rope = rope_table(model.args, 128)
    tokens, positions = (
        torch.randint(0, 64, (3, 6)),
        torch.tensor([[0, 1, 2, 3, 4, 5], [40, 41, 42, -1, -1, -1], [-1] * 6]),
    )
    cache = KVCache(model, 3, 128, torch.bfloat16)
    alone = model(tokens[:1], positions[:1], torch.tensor([0]), rope, cache)
    for pair in cache.layers:
        for x in pair:
            x[1:].normal_()
    together = model(tokens, positions, torch.tensor([0, 1, 2]), rope, cache)
    assert torch.equal(alone[0], together[0])
    assert together.isfinite().all()


def test_torch_attention_equals_the_kernel():
    """The path that a copied model.py takes against the packed one."""
    tokens = torch.randint(0, 64, (1, 70))
    plain, packed = tiny_model(packed=False), tiny_model()
    assert (logits_of(plain, tokens, [70]) - logits_of(packed, tokens, [64, 6])).abs().max() < 1e-4
