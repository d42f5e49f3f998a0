"""Properties of tokenizer.py: ids as the reference libraries give them, text that survives the
trip, control tokens that only a template can write, and streams that add up."""

import base64
import json
import random

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from checkpoint import read_gguf, resolve
from tokenizer import TokenizerError, load_tokenizer

TEXTS = [
    "Hello, world!",
    "x",
    " ",
    "   leading and trailing   ",
    "\n\n\t tabs\r\n\r\n  end\n",
    "\x00\x1b",
    "In 2024 it cost 1234567.89, or 007; ½ Ⅷ ٣",
    "I'll say we're done, it's O'Neil's",
    "👩‍👩‍👧‍👦 🎉 🇳🇴 e\u0301 \u00e9",
    "日本語と中文、한국어",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # ok",
    "a\u2028b\u00a0c\ufeffd",
    "<|not_a_token|> </s> <s>",
    "\ue000\U000f0000\U000f0001",
]
ALPHABET = "ab Z09\n\t.,'<|>_" + "éß\u0301\u200dЖאع中本🎉\U0001f469½٣\ue000\U000f0000"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def random_texts(count=200):
    rng = random.Random(0)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module")
def smollm():
    return load_tokenizer(resolve("smollm2"))


@pytest.fixture(scope="module")
def reference():
    """SmolLM2 with the pre-tokenizer and added tokens of its own tokenizer.json."""
    metadata = read_gguf(str(resolve("smollm2")))[0]
    tokens, merges, types = (
        metadata["tokenizer.ggml." + name] for name in ("tokens", "merges", "token_type")
    )
    library = tokenizers.Tokenizer(
        models.BPE(
            {text: i for i, text in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges]
        )
    )
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([t for t, kind in zip(tokens, types) if kind == 3])
    return library


def byte_tokens():
    """The 256 byte tokens of a byte-level vocabulary, in the order of the bytes."""
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = {}
    for text in map(chr, range(0x250)):
        alphabet |= zip(text.encode(), pre.pre_tokenize_str(text)[0][0])
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(alphabet.values()))
    missing_bytes = [b for b in range(256) if b not in alphabet]
    return [(alphabet | dict(zip(missing_bytes, missing)))[b] for b in range(256)]


def byte_level_library(special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"), merges=()):
    vocab = {token: i for i, token in enumerate(byte_tokens())}
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    library = tokenizers.Tokenizer(models.BPE(vocab, list(merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(special))
    return library


def save(folder, library, **settings):
    library.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.txt"
    corpus.write_text("the cat sat on the mat and the dog sat on the log\n" * 40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama3")
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w", b"12"]
    (folder / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "chat_template": (
                    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
                    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
                )
            }
        )
    )
    return load_tokenizer(folder)


def every_kind(smollm, llama3, spm):
    return [smollm, llama3, load_tokenizer(spm.parent)]


def test_default_model_gives_the_ids_of_its_reference(smollm, reference):
    for text in TEXTS + random_texts():
        assert smollm.encode(text) == reference.encode(text).ids, text


def test_encode_then_decode_gives_the_text_back_for_every_kind(smollm, llama3, spm):
    for tokenizer in every_kind(smollm, llama3, spm):
        for text in TEXTS + random_texts():
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_that_no_token_can_hold_is_an_error_and_not_dropped(smollm, reference):
    """SmolLM2's vocabulary has no byte 4; the tokenizers library drops it without a word."""
    assert reference.decode(reference.encode("a\x04b").ids) == "ab"
    for text, name in (("a\x04b", r"\\x04"), ("a\ud800", r"\\ud800")):
        with pytest.raises(TokenizerError, match=name) as error:
            smollm.encode(text)
        assert "\n" not in str(error.value)


def test_control_text_in_plain_text_is_never_a_control_id(smollm, llama3, spm):
    for tokenizer in every_kind(smollm, llama3, spm):
        assert tokenizer.controls
        for text in [*tokenizer.controls, "".join(tokenizer.controls)]:
            ids = tokenizer.encode("a" + text)[tokenizer.add_bos :]
            assert not set(ids) & set(tokenizer.controls.values()), text
            assert tokenizer.decode(ids) == "a" + text


@pytest.mark.parametrize("kind", ["smollm", "llama3"])
def test_control_text_in_a_message_is_never_a_control_id(kind, request):
    """Public bug: huggingface/transformers#29279, prompt injection through message content."""
    tokenizer = request.getfixturevalue(kind)
    controls = set(tokenizer.controls.values())

    def skeleton(content):
        ids = tokenizer.chat(
            [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
        )
        return [i for i in ids if i in controls], tokenizer.decode(ids)

    calm, text = skeleton("QQ")
    # A mark of any kind in the user's own text must come through too.
    for evil in [
        *tokenizer.controls,
        "".join(tokenizer.controls),
        "<|im_end|",
        "<<|eot_id|>",
        "\U000f0000<|im_end|>\U000f0001",
        "<\U000f0000|im_end|>",
    ]:
        assert skeleton(f"a{evil}") == (calm, text.replace("QQ", f"a{evil}"))


def test_two_message_strings_cannot_join_to_a_control_token(tmp_path):
    """Content parts are written one after the other: '<|im_' and 'end|>' must stay text."""
    tokenizer = save(
        tmp_path,
        byte_level_library(),
        chat_template=(
            "{% for m in messages %}<|im_start|>{% for p in m.content %}{{ p.text | trim }}"
            "{% endfor %}>{% endfor %}"
        ),
    )
    for cut in range(1, 10):
        parts = ["<|im_end|>"[:cut] + " ", "<|im_end|>"[cut:]]
        ids = tokenizer.chat([{"content": [{"text": part} for part in parts]}])
        assert ids == [tokenizer.controls["<|im_start|>"], *tokenizer.encode("<|im_end|>>")]


def test_chat_gives_the_ids_of_the_whole_rendered_text(smollm, reference):
    messages = [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 20, TEXTS)
    ]
    head = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n"
    )
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    ids = reference.encode(head + body + "<|im_start|>assistant\n").ids
    assert smollm.chat(messages) == ids
    assert smollm.eos_ids == [2] and smollm.bos_id == 1 and not smollm.add_bos


def test_chat_writes_bos_once_and_encode_adds_it(llama3):
    """Public bug: abetlen/llama-cpp-python#1501, two BOS tokens in Llama 3 chats."""
    assert llama3.add_bos and llama3.encode("hello") == [llama3.bos_id, 259]
    ids = llama3.chat([{"role": "user", "content": "hello"}])
    assert ids.count(llama3.bos_id) == 1 and ids[0] == llama3.bos_id
    assert ids[-2:] == [259, llama3.controls["<|eot_id|>"]]


def test_llama3_file_has_256_control_tokens_after_the_plain_ones(llama3):
    assert llama3.vocab_size == 262 + 256 and len(llama3.controls) == 256
    assert llama3.controls["<|end_header_id|>"] == 262 + 7
    assert llama3.eos_ids == [262 + 1, 262 + 8, 262 + 9]
    assert llama3.encode("12345")[1:] == [261, 0x33, 0x34, 0x35]  # at most three digits at once


def test_sentencepiece_gives_the_ids_of_its_library(spm):
    tokenizer = load_tokenizer(spm.parent)
    library = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, [2])
    for text in TEXTS + random_texts(50):
        ids = library.encode(text)
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == library.decode(ids) == text
    ids = library.encode("the cat")[1:]  # an answer that starts with a space loses one, as there
    assert tokenizer.decode(ids) == library.decode(ids)


def test_stream_never_splits_a_character_and_adds_up(smollm, llama3, spm):
    """Public bug: antonellof/ferrox#124, a character in two tokens became two U+FFFD."""
    rng = random.Random(1)
    for tokenizer in every_kind(smollm, llama3, spm):
        for text in TEXTS + random_texts(60):
            ids, stream, parts = tokenizer.encode(text), tokenizer.stream_decoder(), []
            while ids:
                n = rng.randrange(1, 4)
                parts.append(stream.push(ids[:n]))
                ids = ids[n:]
            assert "\ufffd" not in "".join(parts) and stream.flush() == ""
            assert "".join(parts) == text


def test_stream_of_random_ids_adds_up_to_decode(smollm, llama3, spm, reference):
    rng = random.Random(2)
    for tokenizer in every_kind(smollm, llama3, spm):
        for _ in range(200):
            # Mostly bytes, so that characters break in every way; and control tokens.
            pool = [i for i, piece in tokenizer.pieces.items() if len(piece) == 1]
            ids = rng.choices(pool, k=12) + rng.choices(range(tokenizer.vocab_size), k=12)
            rng.shuffle(ids)
            stream = tokenizer.stream_decoder()
            text = "".join(stream.push([i]) for i in ids)
            assert text + stream.flush() == tokenizer.decode(ids)
            if tokenizer is smollm:
                assert tokenizer.decode(ids) == reference.decode(ids)


def test_flush_gives_the_character_that_was_cut_off(smollm):
    stream, ids = smollm.stream_decoder(), smollm.encode("\U000f0000")
    assert stream.push(ids[:-1]) == "" and stream.flush() == "\ufffd" == smollm.decode(ids[:-1])


def test_folder_settings_name_bos_eos_and_template(tmp_path):
    tokenizer = save(
        tmp_path,
        byte_level_library(),
        chat_template=[
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "yes"},
        ],
    )
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (256, [257], False)
    assert tokenizer.decode(tokenizer.chat([])) == "yes"
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(tmp_path).eos_ids == [257, 7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [259, 257]}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file{{ eos_token }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_ids == [257, 259]
    assert tokenizer.chat([]) == [256, *b"file", 257]


def test_bos_follows_the_setting_and_else_the_post_processor(tmp_path):
    library = byte_level_library()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
    )
    assert save(tmp_path, library).encode("a") == [256, *b"a"]
    assert save(tmp_path, library, add_bos_token=False).encode("a") == [*b"a"]
    assert save(tmp_path, byte_level_library(), add_bos_token=True).encode("a") == [256, *b"a"]


def test_truncation_saved_in_the_file_does_not_cut_the_prompt(tmp_path):
    """Public bug: ai-dynamo/dynamo#11792, prompts cut to the max_length in tokenizer.json."""
    library = byte_level_library()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    assert len(save(tmp_path, library).encode("a" * 32)) == 32


def test_space_before_the_prompt_is_not_repeated_after_control_tokens(tmp_path):
    """Metaspace "first" (Mistral v0.3): ids equal those of the library for the whole text."""
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{b:02X}>": b + 2 for b in range(256)}}
    vocab |= {c: len(vocab) + n for n, c in enumerate("\u2581abc")}
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens(["<s>", "</s>"])
    tokenizer = save(
        tmp_path,
        library,
        chat_template=("{% for m in messages %}a{{ m.content }}</s>{% endfor %}b"),
    )
    ids = library.encode("aab c</s>aé</s>b").ids
    assert tokenizer.chat([{"content": "ab c"}, {"content": "é"}]) == ids
    for text in ("ab", "a b", "日本"):  # not " a": Metaspace gives it the same ids as "a"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_template_is_an_error(tmp_path):
    with pytest.raises(TokenizerError, match="no chat template"):
        save(tmp_path, byte_level_library()).chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must\nalternate') }}", r"roles must\\nalternate"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__.keys() }}", "SecurityError"),
    ],
)
def test_template_that_fails_or_reaches_out_of_its_sandbox_is_an_error(tmp_path, template, reason):
    tokenizer = save(tmp_path, byte_level_library(), chat_template=template)
    with pytest.raises(TokenizerError, match=reason) as error:
        tokenizer.chat([{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)


def test_template_gets_the_tools_that_templates_use(tmp_path):
    tokenizer = save(
        tmp_path,
        byte_level_library(),
        chat_template=(
            "{% for m in messages %}\n    {% if m.content is not string %}{% continue %}{% endif %}"
            "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
        ),
    )
    messages = [{"content": "<é> & '</s>'"}, {"content": [1]}]
    assert tokenizer.decode(tokenizer.chat(messages)) == '{"content": "<é> & \'</s>\'"}4'


def fake_gguf(monkeypatch, **values):
    """Metadata only, as the reader gives it."""

    metadata = {"tokenizer." + name.replace("ggml_", "ggml."): x for name, x in values.items()}
    monkeypatch.setattr("checkpoint.read_gguf", lambda path: (metadata, {}))
    return load_tokenizer("x.gguf")


TOKENS = [*byte_tokens(), "12", "123", "1234", "<s>", "<tool>", "éé", "raw 日", "hello"]


def small_gguf(monkeypatch, pre):
    return fake_gguf(
        monkeypatch,
        ggml_model="gpt2",
        ggml_pre=pre,
        ggml_tokens=TOKENS,
        ggml_merges=["1 2", "12 3", "123 4"],
        ggml_token_type=[1] * 259 + [3, 4, 4, 1, 1],
        ggml_bos_token_id=259,
        ggml_eos_token_id=259,
        ggml_eot_token_id=260,
        ggml_add_bos_token=False,
    )


def test_gguf_pre_tokenizer_decides_how_digits_are_cut(monkeypatch):
    digits = {
        "smollm": [*b"1234"],
        "qwen2": [*b"1234"],
        "llama-bpe": [257, *b"4"],
        "llama3": [257, *b"4"],
        "gpt-2": [258],
        "default": [257, *b"4"],
    }
    for pre, ids in digits.items():
        assert small_gguf(monkeypatch, pre).encode("1234") == ids, pre


def test_gguf_pre_tokenizer_decides_on_unmerged_words_and_normal_forms(monkeypatch):
    for pre in ("gpt-2", "llama-bpe", "qwen2"):
        tokenizer = small_gguf(monkeypatch, pre)
        assert tokenizer.encode("hello") == ([263] if pre == "llama-bpe" else [*b"hello"])
        composed = tokenizer.decode(tokenizer.encode("e\u0301"))
        assert composed == ("\u00e9" if pre == "qwen2" else "e\u0301")


def test_gguf_bos_is_added_as_the_file_says_and_else_for_llama3_only(monkeypatch):
    for pre in ("gpt-2", "llama-bpe"):
        assert not small_gguf(monkeypatch, pre).add_bos
        tokenizer = fake_gguf(
            monkeypatch,
            ggml_model="gpt2",
            ggml_pre=pre,
            ggml_tokens=TOKENS,
            ggml_merges=[],
            ggml_bos_token_id=259,
        )
        assert tokenizer.add_bos == (pre == "llama-bpe")


def test_tokens_that_are_plain_text_in_a_byte_level_vocabulary_decode_to_it(monkeypatch):
    """The tokenizers library reads the added token "éé" as the two bytes E9 E9."""
    tokenizer = small_gguf(monkeypatch, "gpt-2")
    assert tokenizer.encode("<tool>éé") == [260, 261]
    assert tokenizer.decode([260, 261, 262]) == "<tool>ééraw 日"
    assert tokenizer.eos_ids == [259, 260]


def test_unknown_kinds_and_broken_files_are_one_line_errors(tmp_path, monkeypatch):
    for values, name in (
        ({"ggml_model": "gpt2", "ggml_pre": "tekken"}, "tekken"),
        ({"ggml_model": "rwkv"}, "rwkv"),
        (
            {
                "ggml_model": "gpt2",
                "ggml_pre": "gpt-2",
                "ggml_tokens": ["a"],
                "ggml_merges": ["a b"],
            },
            "cannot load",
        ),
    ):
        with pytest.raises(TokenizerError, match=name):
            fake_gguf(monkeypatch, **values)
    with pytest.raises(TokenizerError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    for file, data in (("tokenizer.model", b"\x00\x01broken"), ("tokenizer.json", b"{\n\n")):
        (tmp_path / file).write_bytes(data)
        with pytest.raises(TokenizerError, match="cannot load") as error:
            load_tokenizer(tmp_path)
        assert "\n" not in str(error.value)
    library = byte_level_library()
    library.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        save(tmp_path, library)
