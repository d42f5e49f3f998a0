"""The LLM class and the command line, on the real default model."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, tiny_model

from batch import read_jobs, run_jobs
from generate import LLM, TextStream, main
from request import Request, SamplingParams
from scheduler import Scheduler

PROMPTS = [
    "List the days of the week, then list them again.",
    "def add(a, b):\n    return a + b\n\nWrite this function again, and one named sub.",
    "What is the capital of France?",
    "Repeat after me: one two three one two three one two three.",
    "Write a short poem about the sea. \U0001f30a",
    "Translate to German: The house is green.",
    "1, 2, 4, 8, 16,",
    "Explain recursion in two sentences.",
]


@pytest.fixture(scope="module")
def llm(smollm2):
    """Eager: compiled equals eager bit for bit (test_compiled_equals_eager...), and starts at once."""
    return LLM("smollm2", spec="ngram", k=5, max_batch_size=4, max_seq_length=512, compile=False)


def ids_of(llm, options, params, prompts=PROMPTS) -> list[list[int]]:
    scheduler = Scheduler(llm.model, **{
        "eos_ids": llm.scheduler.eos_ids, "max_seq_length": 512, "compile": False, **options})  # fmt: skip
    requests = [Request(llm.encode([{"role": "user", "content": p}]), params) for p in prompts]
    for r in requests:
        scheduler.add(r)
    scheduler.run()
    return [r.token_ids for r in requests]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_identity_on_the_real_model_in_bf16(llm, temperature):
    """Speculation, k, batch mates, chunks, prefix cache, async, compile: not one token changes."""
    params = SamplingParams(max_new_tokens=32, temperature=temperature, seed=5)
    plain = ids_of(llm, {"spec": "none", "k": 0, "run_async": False, "prefix_cache": False}, params)
    for options in (
        {"spec": "none", "k": 5}, {"k": 1}, {"k": 5}, {"k": 8, "ngram_max": 4, "per_match": 0},
        {"k": 5, "max_batch_size": 8}, {"k": 3, "max_batch_size": 3, "prefill_chunk_size": 17},
    ):  # fmt: skip
        assert ids_of(llm, options, params) == plain, options


def test_batch_mates_never_change_a_token(llm):
    """16 prompts of 30 to 700 tokens (all lengths of attention), alone and in company, in bf16."""
    code = (ROOT / "spec.py").read_text("utf-8")
    prompts = [p + f" {i}" for i, p in enumerate(PROMPTS)]
    prompts += [f"What does this code do?\n{code[i * 100 : i * 100 + 250 * i]}" for i in range(1, 9)]
    options, params = {"max_seq_length": 1024}, SamplingParams(max_new_tokens=32)
    alone = [ids_of(llm, options, params, [p])[0] for p in prompts]
    for batch_size in (16, 5):
        together = ids_of(llm, {**options, "max_batch_size": batch_size}, params, prompts)
        assert together == alone, batch_size


def test_compiled_equals_eager_and_never_recompiles(llm):
    """Prompts of any length, after the first, under error_on_recompile; buffers keep their addresses."""
    scheduler = Scheduler(llm.model, k=5, max_batch_size=2, max_seq_length=512)
    params = SamplingParams(max_new_tokens=24)
    scheduler.warm_up()
    addresses = [t.data_ptr() for t in vars(scheduler.buffers).values() if isinstance(t, torch.Tensor)]
    requests = [Request(llm.encode([{"role": "user", "content": p * n}]), params) for n, p in enumerate(PROMPTS, 1)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for r in requests:
            scheduler.add(r)
        scheduler.run()
    eager = Scheduler(llm.model, spec="none", k=0, max_seq_length=512, compile=False)
    for r in requests:
        check = eager.add(Request(r.prompt_token_ids, params))
        eager.run()
        assert check.token_ids == r.token_ids
    assert addresses == [t.data_ptr() for t in vars(scheduler.buffers).values() if isinstance(t, torch.Tensor)]


def test_the_level_that_the_readme_states_is_the_one_this_device_has(llm):
    assert llm.shape_invariant and "level two" in (ROOT / "README.md").read_text()


def test_stop_strings_cut_ids_and_text_at_the_same_place(llm):
    """vLLM 47616: the text was trimmed, the ids went on past the stop."""
    whole = llm.chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(max_new_tokens=40))
    for stop in ("Wed", "nesday", whole.text[10:13], "\n"):
        r = llm.chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(max_new_tokens=40, stop=stop))
        assert r.finish_reason == "stop" and r.text == whole.text[: whole.text.index(stop)]
        assert r.token_ids == whole.token_ids[: len(r.token_ids)]
        assert stop in llm.tokenizer.decode(r.token_ids) and stop not in llm.tokenizer.decode(r.token_ids[:-1])
        assert r.stats.total_num_output_tokens == len(r.token_ids)


def test_stream_gives_the_text_of_generate_and_the_same_counts(llm):
    messages, params = [{"role": "user", "content": PROMPTS[4]}], SamplingParams(max_new_tokens=40)
    *pieces, result = llm.stream(messages, params)
    assert "".join(text for text, _ in pieces) == result.text == llm.chat(messages, params).text
    assert any(drafted for _, drafted in llm.stream([{"role": "user", "content": PROMPTS[3]}], params) if _)


def test_an_abandoned_stream_leaves_no_request_behind(llm):
    stream = llm.stream(PROMPTS[2], SamplingParams(max_new_tokens=50))
    next(stream)
    stream.close()
    assert llm.scheduler.unfinished == 0
    assert llm.generate(PROMPTS[6], SamplingParams(max_new_tokens=4)).finish_reason == "length"


def test_a_refused_prompt_among_others_leaves_nothing_running(llm):
    with pytest.raises(ValueError, match="max_seq_length"):
        llm.generate(["fine", "x " * 600], SamplingParams(max_new_tokens=8))
    assert llm.scheduler.unfinished == 0


def test_on_result_may_continue_a_conversation(llm):
    turns, params = ["Name a colour.", "Name another."], SamplingParams(max_new_tokens=12)

    def more(index, result):
        if len(result.prompt) == 1:
            return [*result.prompt, {"role": "assistant", "content": result.text}, {"role": "user", "content": turns[1]}]

    (r,) = llm.generate([[{"role": "user", "content": turns[0]}]], params, more)
    assert len(r.prompt) == 3 and r.num_cached_tokens > 10
    assert r.token_ids == llm.generate([r.prompt], params)[0].token_ids


class Letters:
    """A tokenizer of one character per id, for TextStream alone."""

    def stream_decoder(self):
        return self

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


@pytest.mark.parametrize("text, stops", [("abcabd", ["abd"]), ("aaab", ["aab"]), ("xyz", ["yq", "z"]), ("abc", ["q"])])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_no_part_of_a_stop_string_is_ever_handed_out(text, stops, size):
    stream, shown = TextStream(Letters(), tuple(stops)), ""
    for i in range(0, len(text), size):
        keep = stream.push([ord(c) for c in text[i : i + size]], 0)
        shown += "".join(t for t, _ in stream.pieces)
        stream.pieces.clear()
        if keep is not None:
            break
    cut = min([text.index(s) for s in stops if s in text], default=len(text))
    assert text[:cut].startswith(shown) and stream.finish() == text[:cut]


# -- the command line

BAD = [
    (["--model", "nonsense"], "no model 'nonsense'"),
    (["--k", "-1"], "k is -1"),
    (["--prompt", ""], "prompt is empty"),
    (["--top_p", "2"], "top_p is 2.0"),
    (["--temperature", "-1"], "temperature is -1.0"),
    (["--max_new_tokens", "0"], "max_new_tokens is 0"),
    (["--max_new_tokens", "3000", "--no-compile"], r"max_new_tokens 3000 exceeds max_seq_length 2048"),
    (["--max_seq_length", "100000"], "max_seq_length is 100000"),
    (["--prompt", "x", "--ngram_min", "3", "--ngram_max", "2"], "ngram_max is 2"),
    (["--prompt_file", "/nowhere"], "/nowhere"),
    (["--device", "nonsense"], "device"),
]


@pytest.mark.parametrize("arguments, words", BAD)
def test_bad_input_is_one_line_and_status_2(smollm2, capsys, arguments, words):
    import re

    assert main(arguments) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("loading")]
    assert len(lines) == 1 and re.search(words, lines[0]), lines


def test_broken_prompt_files_name_file_and_line(tmp_path):
    file = tmp_path / "p.jsonl"
    for content, words in [
        (b'"ok"\n{"x": 1}\n', "line 2"), (b'"ok"\nnot json\n', "line 2: not JSON"), (b"\n", "no prompts"),
        (b'"\xff"\n', "not UTF-8"), (b'""\n', "line 1"), (b'{"turns": []}', "line 1"),
    ]:  # fmt: skip
        file.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_jobs(str(file), None, SamplingParams())


def test_json_on_stdout_is_one_object_per_request_and_nothing_else(smollm2, tmp_path):
    file = tmp_path / "p.jsonl"
    rows = ["Say hi.", {"prompt": "Say ho."}, {"messages": [{"role": "user", "content": "Hi"}]}, {"turns": ["A", "B"]}]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    done = subprocess.run(
        [sys.executable, "generate.py", "--no-compile", "--json", "--prompt_file", file, "--max_new_tokens", "6"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((r["index"], r["turn"]) for r in results) == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]
    for r in results:
        assert len(r["token_ids"]) == r["total_num_output_tokens"] <= 6 and r["finish_reason"] in ("stop", "length")
    assert "acceptance" in done.stderr and "Traceback" not in done.stderr


def test_a_model_without_the_kernels_still_keeps_level_one():
    """Fixed k: spec none and ngram run the same shapes, so torch's own operations give the same tokens."""
    model, params = tiny_model(packed=False), SamplingParams(max_new_tokens=30)
    out = []
    for spec in ("none", "ngram"):
        scheduler = Scheduler(model, spec=spec, k=4, max_seq_length=96, compile=False)
        r = scheduler.add(Request([1, 2, 3, 1, 2], params))
        scheduler.run()
        out.append(r.token_ids)
    assert out[0] == out[1]


# -- batch runs


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    file = tmp_path_factory.mktemp("jobs") / "p.jsonl"
    rows = [{"turns": [f"Name {n} rivers.", "And lakes?"]} for n in ("two", "three")]
    rows += [f"Count to {n}." for n in (5, 6, 7, 8, 9)]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    return file


def read_results(path) -> dict[tuple[int, int], list[int]]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({(r["index"], r["turn"]) for r in rows}) == len(rows)
    return {(r["index"], r["turn"]): r["token_ids"] for r in rows}


def test_a_prompt_that_does_not_fit_is_reported_and_the_others_go_on(llm, jobs, capsys):
    """At the start and as a later turn of a conversation that outgrew its slot."""
    params, seen = SamplingParams(max_new_tokens=8), {}
    work = read_jobs(str(jobs), None, params)
    work[0].later[0] = work[2].prompt = "word " * 3000
    results = run_jobs(llm, work, True, lambda line, r: seen.setdefault(json.loads(line)["index"], []).append(r))
    assert sorted(i for i, rs in seen.items() if rs[-1].error) == [0, 2] and len(results) == 9
    assert seen[0][0].token_ids and seen[0][1].finish_reason == "refused"
    assert "exceeds max_seq_length 512" in seen[2][0].error
    assert capsys.readouterr().err.count("exceeds max_seq_length") == 2
    assert llm.scheduler.unfinished == 0


def test_a_full_disk_ends_the_run_with_whole_lines_and_resume_goes_on(llm, jobs, tmp_path):
    resource = pytest.importorskip("resource")
    work, whole, cut = read_jobs(str(jobs), None, SamplingParams(max_new_tokens=8)), tmp_path / "a", tmp_path / "b"
    run_jobs(llm, work, True, lambda *a: None, str(whole))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (whole.stat().st_size // 2, before[1]))
    try:
        with pytest.raises(OSError, match="cannot write .* make room and go on with --resume"):
            run_jobs(llm, work, True, lambda *a: None, str(cut))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert llm.scheduler.unfinished == 0
    some = read_results(cut)
    assert 0 < len(some) < 9
    run_jobs(llm, work, True, lambda *a: None, str(cut), resume=True)
    assert read_results(cut) == read_results(whole)


def test_resume_drops_a_line_that_was_cut_inside(llm, jobs, tmp_path):
    """A prefix of a JSON line may well end with a brace."""
    work, file = read_jobs(str(jobs), None, SamplingParams(max_new_tokens=8)), tmp_path / "a"
    run_jobs(llm, work, True, lambda *a: None, str(file))
    want, lines = read_results(file), file.read_text("utf-8").splitlines()
    file.write_text("\n".join([*lines[:4], lines[4][: lines[4].index("}") + 1]]), "utf-8")
    run_jobs(llm, work, True, lambda *a: None, str(file), resume=True)
    assert read_results(file) == want


def test_resume_never_overwrites_a_file_of_something_else(llm, jobs):
    before = jobs.read_bytes()
    with pytest.raises(ValueError, match="something else than results"):
        run_jobs(llm, read_jobs(str(jobs), None, SamplingParams()), True, lambda *a: None, str(jobs), resume=True)
    assert jobs.read_bytes() == before


def test_ctrl_c_keeps_what_is_done_and_resume_completes_it(smollm2, jobs, tmp_path):
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "generate.py", "--no-compile", "--prompt_file", jobs, "--max_new_tokens", "40"]
    command += ["--ignore_eos", "--max_batch_size", "2", "--output", output]
    run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not (output.exists() and output.stat().st_size) and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 130 and "interrupted" in error and "Traceback" not in error
    some = read_results(output)
    assert 0 < len(some) < 9
    done = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    all_of_it = read_results(output)
    assert len(all_of_it) == 9 and all(len(ids) == 40 for ids in all_of_it.values())
