"""Quantized weights: codes against the gguf package, kernels against float64, rows against rows."""

import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT, tiny_model
from test_model import block, logits_of

import cpu_kernels
from checkpoint import cache_dir
from cpu_kernels import PackedLinear
from model import Transformer
from quantize import QuantizedLinear, dequantize, quantize, quantize_linears

pytestmark = pytest.mark.filterwarnings("ignore")


def linear(n=160, k=96, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Linear(k, n, bias=False).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bits", [8, 4])
def test_no_weight_moves_by_more_than_half_a_step(bits):
    w = linear().weight.data
    w[0] = 0
    codes, factors = quantize(w, bits)
    step = factors[:, :, 0].float().repeat_interleave(96 // factors.shape[1], 1)
    assert codes.dtype == torch.uint8 and int(codes.max()) < 2**bits
    assert ((dequantize(codes, factors) - w).abs() <= 0.5 * step + 2e-3 * w.abs().max()).all()


def test_weights_of_a_q4_1_file_come_back_as_they_were():
    w = linear(64, 256).weight.numpy()
    stored = gguf.quants.dequantize(gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q4_1),
                                    gguf.GGMLQuantizationType.Q4_1)  # fmt: skip
    again = dequantize(*quantize(torch.from_numpy(np.array(stored)), 4)).numpy()
    assert np.abs(again - stored).max() < 1e-3 * np.abs(stored).max()


def expected(x, layer, bits):
    """In float64: each 32 (int8: 64 if they divide the row) inputs of a row in 255 steps, times the
    weight that the codes stand for.
    """
    codes, factors = quantize(layer.weight.data, bits)
    runs = x.view(len(x), -1, 64 if bits == 8 and x.shape[1] % 64 == 0 else 32)
    scale = runs.abs().amax(2, keepdim=True) / 127
    rounded = ((runs / scale).round().double() * scale.double()).view(x.shape)
    return rounded @ dequantize(codes, factors).double().T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("k", [96, 128])
def test_quantized_kernel_equals_float64(bits, dtype, k):
    layer, x = linear(160, k, dtype), torch.randn(23, k)
    got = PackedLinear(layer, block(), bits=bits)(x)
    assert (got - expected(x, layer, bits)).abs().max() < 2e-3 * got.abs().max()  # ties may round apart
    norm = torch.nn.RMSNorm(k, eps=1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    got = PackedLinear(layer, block(), norm, bits=bits)(x)
    assert (got - expected(norm(x), layer, bits)).abs().max() < 5e-3 * got.abs().max()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n", range(1, 65))
def test_quantized_kernel_gives_a_row_the_same_bits_among_any_others(bits, n):
    norm = torch.nn.RMSNorm(96, eps=1e-5)
    for packed in (PackedLinear(linear(), block(), norm, bits=bits),
                   PackedLinear(linear(), block(), swiglu=True, bits=bits)):  # fmt: skip
        x = torch.randn(64, 96 * (1 + packed.f[1]))
        one = torch.cat([packed(row[None]) for row in x])
        assert torch.equal(packed(x[:n]), one[:n])
        assert torch.equal(packed(x[64 - n :]), one[64 - n :])


def quantized_model(bits, tied) -> Transformer:
    model = tiny_model(torch.bfloat16, packed=False, tie_embeddings=tied)
    assert cpu_kernels.install(model, cache_dir(), bits)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_of_a_quantized_model_has_the_same_bits_in_any_chunk_batch_and_slot(bits, tied):
    model, tokens = quantized_model(bits, tied), torch.randint(0, 64, (1, 100))
    whole = logits_of(model, tokens, [100], torch.bfloat16)
    for chunks in ([1] * 100, [6] * 16 + [4], [64, 36], [3, 97]):
        for batch, slot in ((1, 0), (8, 5)):
            got = logits_of(model, tokens, chunks, torch.bfloat16, batch, slot)
            assert torch.equal(got, whole), (chunks, batch)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits, limit", [(8, 0.05), (4, 0.5)])
def test_a_quantized_model_stays_near_its_floats(bits, limit, tied):
    tokens = torch.randint(0, 64, (1, 100))
    want = logits_of(tiny_model(torch.bfloat16, tie_embeddings=tied), tokens, [100], torch.bfloat16)
    got = logits_of(quantized_model(bits, tied), tokens, [100], torch.bfloat16)
    assert (got - want).square().mean().sqrt() < limit * want.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_products_without_our_kernels_equal_float64(bits, dtype):
    """What runs on CUDA and where there is no C++ compiler."""
    layer, x = linear(128, 96, dtype), torch.randn(2, 3, 96).to(dtype)
    want = x.double() @ dequantize(*quantize(layer.weight.data, bits)).double().T
    got = QuantizedLinear(layer, bits)(x)
    assert got.shape == (2, 3, 128) and (got - want).abs().max() < 0.02 * want.abs().max()


def test_quantize_linears_replaces_every_one_of_them():
    model = tiny_model(torch.bfloat16, packed=False)
    quantize_linears(model, 4)
    assert not any(isinstance(m, torch.nn.Linear) for m in model.modules())
    assert model.output.bits == 8 and model.layers[0].attention.wo.bits == 4
    tokens = torch.randint(0, 64, (1, 40))
    assert logits_of(model, tokens, [40], torch.bfloat16).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("mode, fall", [("int8", 0.005), ("int4", 0.04)])
def test_quantization_costs_little_likelihood_and_no_identity(mode, fall, smollm2):
    from generate import LLM, SamplingParams

    text = (ROOT / "README.md").read_text("utf-8")[:2400] + (ROOT / "spec.py").read_text()[:2400]

    def likelihood(llm) -> float:
        ids = torch.tensor([llm.encode(text)])
        logits = logits_of(llm.model, ids, [ids.shape[1]], torch.bfloat16, size=2048)
        return -float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))

    texts, values = set(), []
    for options in ({}, {"quantize": mode}, {"quantize": mode, "spec": "none"}):
        llm = LLM("smollm2", compile=False, **options)
        values.append(likelihood(llm))
        if options:
            ids = llm.generate("Count to ten: one, two,", SamplingParams(max_new_tokens=60)).token_ids
            texts.add(tuple(ids))
        llm.scheduler.close()
    assert len(texts) == 1
    assert values[1] == values[2] and values[1] > values[0] * (1 + fall)  # both are negative
