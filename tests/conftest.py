import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import cpu_kernels  # noqa: E402
from checkpoint import cache_dir  # noqa: E402
from model import ModelArgs, Transformer  # noqa: E402

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
TINY = dict(
    dim=64,
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=64,
    max_position=256,
)  # sizes that the CPU kernels serve


def tiny_model(dtype=torch.float32, packed=True, seed=0, **changes) -> Transformer:
    """A random model with a peaked output distribution, so that texts repeat and drafts are
    accepted now and then.
    """
    torch.manual_seed(seed)
    model = Transformer(ModelArgs(**{**TINY, **changes})).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.copy_(torch.randn_like(p) * (1.0 if "embed" in name or "output" in name else 0.15))
    for name, p in model.named_parameters():
        p.data = p.data.to(torch.float32 if name.endswith("norm.weight") else dtype)
    if packed:
        assert cpu_kernels.install(model, cache_dir())
    return model


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file (downloaded once, about 90 MB)."""
    from checkpoint import resolve

    return resolve("smollm2")
