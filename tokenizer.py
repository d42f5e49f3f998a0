"""Text to token ids and back, from tokenizer.json, GGUF, tiktoken or sentencepiece files."""

import base64
import codecs
import json
import re
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# By GGUF's name for it: the regexes that cut the text, one after the other.
PRE_TOKENIZERS = {
    "smollm": [r"\p{N}", GPT2], "gpt-2": [GPT2], "llama-bpe": [LLAMA3], "llama3": [LLAMA3],
    "qwen2": [LLAMA3.replace("{1,3}", "")],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]}
# GPT-2 writes every byte as a printable character: itself, or one from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = {chr(b): b for b in PRINTABLE}
BYTES |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in PRINTABLE)}


class TokenizerError(ValueError):
    """Text, messages or tokenizer files that cannot be used; one line says what and why."""


class StreamDecoder:
    """Text from ids as they arrive: whole characters only, and in sum exactly decode(all ids)."""

    def __init__(self, pieces: dict[int, bytes], strip_space: bool):
        self.pieces, self.strip_space = pieces, strip_space
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        """Returns the characters that these ids complete; control tokens give none."""
        data = b"".join(self.pieces.get(i, b"") for i in ids)
        if data and self.strip_space:
            data, self.strip_space = data.removeprefix(b" "), False
        return self.utf8.decode(data)

    def flush(self) -> str:
        """Returns U+FFFD for a character that was never completed, else nothing."""
        return self.utf8.decode(b"", final=True)


class Tokenizer:
    """One checkpoint's vocabulary, made by load_tokenizer.

    plain(text, is it the start of the prompt) gives ids; pieces says which bytes a plain token
    stands for, and controls which id a control token's text has.
    """

    def __init__(self, plain, pieces, controls, bos_id, eos_ids, add_bos, chat_template):
        self.plain, self.controls, self.chat_template = plain, controls, chat_template
        self.vocab_size = max(*pieces, *controls.values()) + 1
        self.bos_id: int | None = bos_id
        self.eos_ids: list[int] = [i for i in dict.fromkeys(eos_ids) if i is not None]
        self.add_bos = bool(add_bos) and bos_id is not None
        self.names = {i: text for text, i in controls.items()}
        self.pieces = {i: piece for i, piece in pieces.items() if i not in self.names}
        # A vocabulary that puts a space before the text must take it away again.
        first = next(iter(plain("x", True)), None)
        self.strip_space = self.pieces.get(first, b"").startswith(b" ")

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, after BOS if the checkpoint adds it; never another control token.

        Raises TokenizerError for text the vocabulary cannot hold, such as a lone surrogate.
        """
        return [self.bos_id] * self.add_bos + self._encode(text, True)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids without control tokens; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream_decoder()
        return stream.push(ids) + stream.flush()

    def stream_decoder(self) -> StreamDecoder:
        """Returns a decoder for one sequence of ids that arrives in parts."""
        return StreamDecoder(self.pieces, self.strip_space)

    def chat(self, messages: list[dict]) -> list[int]:
        """Ids of the messages in the checkpoint's chat template, ready for the model's answer.

        Only the template writes control tokens, BOS too; in a message they are plain text.
        Raises TokenizerError if there is no template or it fails on these messages.
        """
        if self.chat_template is None:
            raise TokenizerError("the checkpoint has no chat template; encode plain text instead")
        try:
            source = json.dumps(messages, ensure_ascii=False)
            # A private character that is nowhere in the text marks what is not a control token.
            mark = next(c for c in map(chr, range(0xF0000, 0xFFFFE))
                        if c not in source and c not in self.chat_template)
            text = self._template.render(
                messages=self._break(json.loads(source), mark), tools=None, documents=None,
                add_generation_prompt=True, bos_token=self.names.get(self.bos_id, ""),
                eos_token=self.names.get(next(iter(self.eos_ids), None), ""))
        except Exception as e:  # a template is a program: it can fail in any way
            raise TokenizerError(f"the chat template failed on these messages: {_line(e)}") from e
        ids, start = [], True
        for part in filter(None, re.split(f"({self._controls})(?!{mark})", text)):
            control = self.controls.get(part)
            ids += self._encode(part.replace(mark, ""), start) if control is None else [control]
            start = False
        return ids

    def _encode(self, text: str, start: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise TokenizerError(f"character {e.start} of the text is the lone surrogate "
                                 f"U+{ord(text[e.start]):04X}; remove it") from None
        ids = self.plain(text, start)
        if not self.pieces.keys() >= set(ids):
            bad = next((c for c in text if not self.pieces.keys() >= set(self.plain(c, start))),
                       text)
            raise TokenizerError(f"the vocabulary has no plain token for {bad!a:.99}; remove it")
        return ids

    def _break(self, value, mark: str):
        """Puts the mark into every control text, and into an end of a string that could become
        one with what the template writes next."""
        if isinstance(value, list):
            return [self._break(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._break(k, mark): self._break(v, mark) for k, v in value.items()}
        if not isinstance(value, str):
            return value
        cuts = {m.end() for m in re.finditer(f"(?={self._controls}).", value, re.DOTALL)}
        end = value.rstrip()  # templates trim
        for i in range(max(0, len(end) - max(map(len, self.controls), default=0)), len(end)):
            if any(text.startswith(end[i:]) for text in self.controls):
                cuts.add(i + 1)
        return mark.join(value[a:b] for a, b in pairwise([0, *sorted(cuts), len(value)]))

    @cached_property
    def _controls(self) -> str:
        return "|".join(map(re.escape, sorted(self.controls, key=len, reverse=True))) or "(?!)"

    @cached_property
    def _template(self):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def fail(message):
            raise TemplateError(message)

        def tojson(value, ensure_ascii=False, **layout):  # Jinja's own escapes < and > for HTML
            return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"] = tojson
        env.globals |= {"raise_exception": fail,
                        "strftime_now": lambda layout: datetime.now().strftime(layout)}
        return env.from_string(self.chat_template)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a checkpoint folder or of a .gguf file.

    Raises TokenizerError if there is none, if it is broken, or if its kind is not known here.
    """
    path, fields = Path(path), None
    if path.suffix == ".gguf":
        from checkpoint import gguf_reader  # outside the try: its own errors name the file
        fields = gguf_reader(str(path)).fields
    try:
        return _from_folder(path) if fields is None else _from_gguf(fields)
    except Exception as e:  # the libraries raise whatever they like on a broken file
        raise TokenizerError(f"{path}: cannot load the tokenizer: {_line(e)}") from e


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, TokenizerError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def _from_folder(folder: Path) -> Tokenizer:
    settings, generation, config = (
        json.loads(file.read_text("utf-8")) if (file := folder / name).exists() else {}
        for name in ("tokenizer_config.json", "generation_config.json", "config.json"))
    bos, eos = (token["content"] if isinstance(token, dict) else token
                for token in (settings.get("bos_token"), settings.get("eos_token")))
    stop = generation.get("eos_token_id", config.get("eos_token_id"))
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    if (file := folder / "chat_template.jinja").exists():
        template = file.read_text("utf-8")
    rest = (bos, eos, stop if isinstance(stop, list) else [stop], settings.get("add_bos_token"),
            template)
    if (folder / "tokenizer.json").exists():
        return _from_json((folder / "tokenizer.json").read_text("utf-8"), *rest)
    if not (folder / "tokenizer.model").exists():
        raise TokenizerError("the folder has no tokenizer.json and no tokenizer.model")
    data = (folder / "tokenizer.model").read_bytes()
    tiktoken = re.match(rb"[A-Za-z0-9+/]+=* [0-9]+\s", data)
    return (_from_tiktoken if tiktoken else _from_sentencepiece)(data, *rest)


def _bytes(token: str, byte_level: bool) -> bytes:
    """What a token of a byte-level or of a sentencepiece vocabulary stands for."""
    if byte_level and BYTES.keys() >= set(token):
        return bytes(map(BYTES.get, token))
    if not byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.encode() if byte_level else token.replace("\u2581", " ").encode()


def _from_json(source: str, bos, eos, stop, add_bos, template) -> Tokenizer:
    from tokenizers import Tokenizer as Library
    # "first" puts a space before the start of the prompt, but not after a control token.
    never = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', source)
    begin = Library.from_str(source)
    later = begin if never == source else Library.from_str(never)
    byte_level = "ByteLevel" in repr(begin.decoder)
    if not byte_level and not re.search("ByteFallback|Metaspace", repr(begin.decoder)):
        raise TokenizerError(f"the decoder {begin.decoder!r} is not supported")
    added, vocab = begin.get_added_tokens_decoder(), begin.get_vocab()
    controls = {token.content: i for i, token in added.items() if token.special}
    controls |= {text: vocab[text] for text in (bos, eos) if text is not None}
    for library in (begin, later):
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # that is: as plain text
        if byte_level and not library.model.unk_token and controls:
            # SmolLM2 has no token for the byte 4, and without this it would silently drop it.
            library.model.unk_token = next(iter(controls))
    pieces = {i: _bytes(text, byte_level) for text, i in vocab.items()}
    pieces |= {i: token.content.encode() for i, token in added.items()}
    if add_bos is None:
        add_bos = bos is not None and begin.encode("x").ids[:1] == [vocab[bos]]
    return Tokenizer(
        lambda text, start: (begin if start else later).encode(text, add_special_tokens=False).ids,
        pieces, controls, vocab.get(bos), [vocab.get(eos), *stop], add_bos, template)


def _from_gguf(fields) -> Tokenizer:
    """Writes the byte-level vocabulary as the tokenizer.json that it once was."""
    get = {name.removeprefix("tokenizer.").removeprefix("ggml."): field.contents()
           for name, field in fields.items() if name.startswith("tokenizer.")}.get
    tokens, pre = get("tokens", []), get("pre", "default")
    if get("model") != "gpt2":
        raise TokenizerError(f"GGUF tokenizer model {get('model')!r} is not supported; gpt2 is")
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"GGUF pre-tokenizer {pre!r} is not supported; these are: "
                             f"{', '.join(PRE_TOKENIZERS)}")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
             "use_regex": False}
    llama3 = PRE_TOKENIZERS[pre] == [LLAMA3]
    source = {
        "added_tokens": [  # types 3 and 4 are control tokens and a user's own tokens
            {"id": i, "content": tokens[i], "special": kind == 3, "normalized": False,
             "single_word": False, "lstrip": False, "rstrip": False}
            for i, kind in enumerate(get("token_type", [])) if kind in (3, 4)],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            *({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated",
               "invert": False} for regex in PRE_TOKENIZERS[pre]), level]},
        "decoder": level, "post_processor": None, "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(tokens)},
                  "merges": get("merges"), "ignore_merges": llama3}}
    bos, eos = (tokens[i] if (i := get(name)) is not None else None
                for name in ("bos_token_id", "eos_token_id"))
    return _from_json(json.dumps(source), bos, eos, [get("eot_token_id"), get("eom_token_id")],
                      get("add_bos_token", llama3), get("chat_template"))


def _from_tiktoken(data: bytes, bos, eos, stop, add_bos, template) -> Tokenizer:
    """Llama 3: the file has the plain tokens only, and 256 control tokens follow them."""
    import tiktoken
    ranks = {base64.b64decode(token): int(rank)
             for token, rank in map(bytes.split, data.splitlines())}
    names = ["begin_of_text", "end_of_text", "reserved_special_token_0",
             "reserved_special_token_1", "finetune_right_pad_id", "step_id", "start_header_id",
             "end_header_id", "eom_id", "eot_id", "python_tag",
             *(f"reserved_special_token_{n}" for n in range(2, 247))]
    controls = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(names)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks,
                                 special_tokens=controls)
    eos_id, *turn = (controls[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id"))
    return Tokenizer(
        lambda text, start: encoding.encode_ordinary(text),
        {rank: token for token, rank in ranks.items()}, controls,
        controls[bos or "<|begin_of_text|>"], [controls.get(eos, eos_id), *stop, *turn],
        add_bos is not False, template)


def _from_sentencepiece(data: bytes, bos, eos, stop, add_bos, template) -> Tokenizer:
    """Llama 2. The space before the prompt also comes after each control token, as it does in
    transformers' Llama tokenizer and in llama.cpp."""
    from sentencepiece import SentencePieceProcessor
    library = SentencePieceProcessor(model_proto=data)
    names = [library.id_to_piece(i) for i in range(len(library))]
    controls = {text: i for i, text in enumerate(names)
                if library.is_control(i) or library.is_unknown(i)}
    bos_id, eos_id = (controls.get(text, i if i >= 0 else None)
                      for text, i in ((bos, library.bos_id()), (eos, library.eos_id())))
    return Tokenizer(lambda text, start: library.encode(text),
                     {i: _bytes(text, False) for i, text in enumerate(names)}, controls,
                     bos_id, [eos_id, *stop], add_bos is not False, template)
