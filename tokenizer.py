"""Text to token ids and back, from tokenizer.json, GGUF, tiktoken or sentencepiece files."""
import base64
import codecs
import json
import re
from datetime import datetime
from functools import cached_property
from pathlib import Path

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# By GGUF's name for it: the regexes that cut the text, one after the other.
PRE_TOKENIZERS = {"smollm": [r"\p{N}", GPT2], "gpt-2": [GPT2], "llama-bpe": [LLAMA3],
                  "llama3": [LLAMA3], "qwen2": [LLAMA3.replace("{1,3}", "")],
                  "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]}
# GPT-2 writes every byte as a printable character: itself, or one from U+0100 on.
BYTES = {chr(b): b for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
BYTES |= {chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - {*BYTES.values()}))}


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
    """One checkpoint's vocabulary, from load_tokenizer: plain(text, is it the prompt's start)
    gives ids, pieces the bytes of each plain token, controls the id of each control text."""

    def __init__(self, plain, pieces, controls, bos_id, eos_ids, add_bos, chat_template):
        self.plain, self.controls, self.chat_template = plain, controls, chat_template
        self.vocab_size = max(*pieces, *controls.values()) + 1
        self.bos_id, self.add_bos = bos_id, bool(add_bos) and bos_id is not None
        self.eos_ids: list[int] = [i for i in dict.fromkeys(eos_ids) if i is not None]
        self.names = {i: text for text, i in controls.items()}
        self.pieces = {i: piece for i, piece in pieces.items() if i not in self.names}
        # A vocabulary that puts a space before the text must take it away again.
        self.strip_space = self.pieces.get(plain("x", True)[0], b"").startswith(b" ")
        self.control = "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) or "(?!)"
        # Where a control text begins, or one that the end of the string cuts off.
        heads = {re.escape(text[:k]) for text in controls for k in range(1, len(text))} or {"(?!)"}
        self.risk = rf"(?={self.control}|(?:{'|'.join(heads)})\s*\Z)(?s:(.))"

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, after BOS if the checkpoint adds it; never another control token.
        Raises TokenizerError for text the vocabulary cannot hold, such as a lone surrogate."""
        return [self.bos_id] * self.add_bos + self._encode(text, start=True)

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
        Raises TokenizerError if there is no template or it fails on these messages."""
        if self.chat_template is None:
            raise TokenizerError("the checkpoint has no chat template; encode plain text instead")
        try:
            source = json.dumps(messages, ensure_ascii=False)
            # A private character that is nowhere in the text marks what is not a control token.
            mark = next(c for c in map(chr, range(0xF0000, 0xFFFFE))
                        if c not in source + self.chat_template)
            bos, eos = (self.names.get(i, "") for i in (self.bos_id, [*self.eos_ids, None][0]))
            text = self._template.render(messages=self._break(json.loads(source), mark), tools=None,
                                         bos_token=bos, eos_token=eos, add_generation_prompt=True)
        except Exception as e:  # a template is a program: it can fail in any way
            raise TokenizerError(f"the chat template failed on these messages: {e!r}") from e
        ids = []
        for part in filter(None, re.split(f"({self.control})(?!{mark})", text)):
            ids += ([self.controls[part]] if part in self.controls
                    else self._encode(part.replace(mark, ""), start=not ids))
        return ids

    def _encode(self, text: str, start: bool) -> list[int]:
        if lone := re.search("[\ud800-\udfff]", text):
            raise TokenizerError(f"the text holds the lone surrogate {lone[0]!a}; remove it")
        ids = self.plain(text, start)
        if not self.pieces.keys() >= set(ids):
            bad = (c for c in text if not self.pieces.keys() >= set(self.plain(c, start)))
            raise TokenizerError(f"no plain token can hold {next(bad, text)!a:.99}; remove it")
        return ids

    def _break(self, value, mark: str):
        """Puts the mark into every control text that a message holds or begins."""
        if isinstance(value, list):
            return [self._break(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._break(k, mark): self._break(v, mark) for k, v in value.items()}
        return re.sub(self.risk, rf"\1{mark}", value) if isinstance(value, str) else value

    @cached_property
    def _template(self):
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message):
            raise TokenizerError(message)

        def tojson(value, ensure_ascii=False, **layout):  # Jinja's own escapes < and > for HTML
            return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.filters["tojson"], env.globals["raise_exception"] = tojson, raise_exception
        env.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        return env.from_string(self.chat_template)


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads the tokenizer of a checkpoint folder or of a .gguf file.
    Raises TokenizerError if there is none, if it is broken, or if its kind is not known here."""
    if gguf := str(path).endswith(".gguf"):
        from checkpoint import read_gguf  # outside the try: its own errors name the file
        metadata = read_gguf(str(path))[0]
    try:
        return _from_gguf(metadata) if gguf else _from_folder(Path(path))
    except Exception as e:  # the libraries raise whatever they like on a broken file
        raise TokenizerError(f"{path}: cannot load the tokenizer: {e!r}") from e


def _from_folder(folder: Path) -> Tokenizer:
    names = ("tokenizer_config.json", "config.json", "generation_config.json")
    settings, config, generation = (json.loads((folder / name).read_text("utf-8"))
                                    if (folder / name).exists() else {} for name in names)
    bos, eos = (token["content"] if isinstance(token, dict) else token
                for token in map(settings.get, ("bos_token", "eos_token")))
    stop = (config | generation).get("eos_token_id")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    if (file := folder / "chat_template.jinja").exists():
        template = file.read_text("utf-8")
    rest = (stop if isinstance(stop, list) else [stop], settings.get("add_bos_token"), template)
    if (file := folder / "tokenizer.json").exists():
        import tokenizers
        return _from_library(tokenizers.Tokenizer.from_file(str(file)), bos, eos, *rest)
    if not (file := folder / "tokenizer.model").exists():
        raise TokenizerError("the folder has no tokenizer.json and no tokenizer.model")
    tiktoken = re.match(rb"[A-Za-z0-9+/]+=* [0-9]+\s", data := file.read_bytes())
    return (_from_tiktoken if tiktoken else _from_sentencepiece)(data, *rest)


def _from_gguf(metadata) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    get = {name.removeprefix("tokenizer.").removeprefix("ggml."): value
           for name, value in metadata.items() if name.startswith("tokenizer.")}.get
    tokens, types, pre = get("tokens", []), get("token_type", []), get("pre", "default")
    if get("model") != "gpt2" or pre not in PRE_TOKENIZERS:
        raise TokenizerError(f"a GGUF tokenizer {get('model')!r} with pre-tokenizer {pre!r} is "
                             f"not supported; gpt2 with one of {', '.join(PRE_TOKENIZERS)} is")
    llama3 = PRE_TOKENIZERS[pre] == [LLAMA3]
    merges = [tuple(pair.split(" ")) for pair in get("merges")]
    library = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges,
                                   ignore_merges=llama3))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre]),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.add_special_tokens([text for text, kind in zip(tokens, types) if kind == 3])
    library.add_tokens([text for text, kind in zip(tokens, types) if kind == 4])
    bos, eos = (None if (i := get(f"{name}_token_id")) is None else tokens[i]
                for name in ("bos", "eos"))
    return _from_library(library, bos, eos, [get("eot_token_id"), get("eom_token_id")],
                         get("add_bos_token", llama3), get("chat_template"))


def _bytes(token: str, byte_level: bool) -> bytes:
    """What a token of a byte-level or of a sentencepiece vocabulary stands for."""
    if byte_level:
        return bytes(map(BYTES.get, token)) if BYTES.keys() >= set(token) else token.encode()
    byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()


def _from_library(library, bos, eos, stop, add_bos, template) -> Tokenizer:
    byte_level = "ByteLevel" in repr(library.decoder)
    if not byte_level and not re.search("ByteFallback|Metaspace", repr(library.decoder)):
        raise TokenizerError(f"the decoder {library.decoder!r} is not supported")
    added, vocab = library.get_added_tokens_decoder(), library.get_vocab()
    controls = {token.content: i for i, token in added.items() if token.special}
    controls |= {text: vocab[text] for text in (bos, eos) if text is not None}
    library.no_truncation()
    library.no_padding()
    if add_bos is None:
        add_bos = library.encode("x").ids[:1] == [vocab.get(bos)]
    if byte_level and controls and not library.model.unk_token:
        # SmolLM2 has no token for the byte 4: make this an error, the library drops it silently.
        library.model.unk_token = next(iter(controls))
    later = library
    if "prepend_scheme=first" in repr(library.pre_tokenizer):
        # The prompt starts with a space, but text after a control token does not.
        later = type(library).from_str(library.to_str().replace(
            '"prepend_scheme":"first"', '"prepend_scheme":"never"'))
    library.encode_special_tokens = later.encode_special_tokens = True  # that is: as plain text
    pieces = {i: _bytes(text, byte_level) for text, i in vocab.items()}
    pieces |= {i: token.content.encode() for i, token in added.items()}
    return Tokenizer(lambda text, start: (library if start else later).encode(
        text, add_special_tokens=False).ids, pieces, controls, vocab.get(bos),
        [vocab.get(eos), *stop], add_bos, template)


def _from_tiktoken(data: bytes, stop, add_bos, template) -> Tokenizer:
    """Llama 3: the file has the plain tokens only, and 256 control tokens follow them."""
    import tiktoken
    lines = map(bytes.split, data.splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    spare = [f"reserved_special_token_{n}" for n in range(247)]
    names = ["begin_of_text", "end_of_text", *spare[:2], "finetune_right_pad_id", "step_id",
             "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", *spare[2:]]
    controls = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(names)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3, mergeable_ranks=ranks,
                                 special_tokens=controls)
    ends = [controls[f"<|{name}|>"] for name in ("end_of_text", "eom_id", "eot_id")]
    return Tokenizer(lambda text, start: encoding.encode_ordinary(text),
                     {i: token for token, i in ranks.items()}, controls, len(ranks),
                     [*ends, *stop], add_bos is not False, template)


def _from_sentencepiece(data: bytes, stop, add_bos, template) -> Tokenizer:
    """Llama 2. As in transformers and llama.cpp, text after a control token starts with a space."""
    from sentencepiece import SentencePieceProcessor
    library = SentencePieceProcessor(model_proto=data)
    names = [library.id_to_piece(i) for i in range(len(library))]
    controls = {text: i for i, text in enumerate(names)
                if library.is_control(i) or library.is_unknown(i)}
    bos_id, eos_id = (i if i >= 0 else None for i in (library.bos_id(), library.eos_id()))
    return Tokenizer(lambda text, start: library.encode(text),
                     {i: _bytes(text, False) for i, text in enumerate(names)}, controls,
                     bos_id, [eos_id, *stop], add_bos is not False, template)
