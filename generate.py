"""Text with n-gram speculative decoding: the LLM class, and the command line around it."""

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

import cpu_kernels
from batch import Job, as_prompt, read_jobs, run_jobs
from checkpoint import cache_dir, load_weights, open_checkpoint, resolve
from model import Transformer
from quantize import BITS, quantize_linears
from request import Request, Result, SamplingParams
from scheduler import Scheduler
from spec import SpecStats
from tokenizer import Tokenizer, load_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
DEFAULT_PROMPT = """Here is a Python class:

class Account:
    def __init__(self, owner, balance):
        self.owner, self.balance = owner, balance
    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance
    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance

Write the class again, with a docstring in every method."""


class TextStream:
    """Turns a request's token ids into text as they come, and ends it at a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.decoder, self.stop, self.text = tokenizer.stream_decoder(), stop, ""
        self.shown = 0  # characters handed out; what may begin a stop string is held back
        self.stopped = False
        self.pieces: deque[tuple[str, bool]] = deque()  # (text, from accepted drafts)

    def push(self, ids: list[int], num_accepted: int) -> int | None:
        """-> how many of the ids to keep if a stop string ends with one (Request.on_tokens)."""
        for i, token in enumerate(ids):
            before = len(self.text)
            self.text += self.decoder.push([token])
            if self._cut(before):
                self._hand_out(len(self.text), i < num_accepted)
                return i + 1
            ends = [s[:n] for s in self.stop for n in range(1, len(s))]
            held = max((len(end) for end in ends if self.text.endswith(end)), default=0)
            self._hand_out(len(self.text) - held, i < num_accepted)
        return None

    def _cut(self, before: int) -> bool:
        """Cut the text at the first stop string that ends beyond `before`."""
        found = [(self.text.find(s, max(0, before - len(s) + 1)), s) for s in self.stop]
        found = [at for at, s in found if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def _hand_out(self, end: int, drafted: bool) -> None:
        if end > self.shown:
            self.pieces.append((self.text[self.shown : end], drafted))
            self.shown = end

    def finish(self) -> str:
        if not self.stopped:
            before = len(self.text)
            self.text += self.decoder.flush()
            self._cut(before)
            self._hand_out(len(self.text), False)
        return self.text


class LLM:
    """A model ready to decode: load once, then `generate`, `chat` or `stream`.

    model: 'smollm2', a checkpoint folder, a .gguf file or a Hugging Face repo id. spec: 'ngram' or
    'none'; k: drafts per step (default 5 for ngram, 0 for none: then one row per step).
    max_seq_length: tokens per request, prompt and output, default min(2048, the model's). device:
    default 'cuda' if there is one. Raises ValueError for bad input.
    """

    def __init__(
        self, model: str = "smollm2", *, spec: str = "ngram", k: int | None = None,
        max_seq_length: int | None = None, dtype: str = "bfloat16", device: str | None = None,
        compile: bool = True, prefill_chunk_size: int | None = None, quantize: str = "none",
        **options,
    ):  # fmt: skip
        if quantize not in BITS:
            raise ValueError(f"quantize is {quantize!r}: must be one of {', '.join(BITS)}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: must be one of {', '.join(DTYPES)}")
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in ["cpu", "cuda"][: 1 + torch.cuda.is_available()]:
            raise ValueError(f"device is {self.device!r}: must be cpu, or cuda where there is one")
        path = resolve(model)
        checkpoint = open_checkpoint(path)
        self.args = checkpoint.args
        max_seq_length = max_seq_length or min(2048, self.args.max_position)
        if max_seq_length > self.args.max_position:
            raise ValueError(
                f"max_seq_length is {max_seq_length}: the model was trained for "
                f"{self.args.max_position} positions"
            )
        self.tokenizer = load_tokenizer(path)
        start = time.perf_counter()
        with torch.device("meta"):
            self.model = Transformer(self.args).eval().requires_grad_(False)
        load_weights(checkpoint, self.model, DTYPES[dtype], self.device)
        # Whether a row's bits are free of the step's shape (level two): then k, batch and chunks
        # change no token.
        bits, where = BITS[quantize], cache_dir()
        self.shape_invariant = self.device == "cpu" and cpu_kernels.install(self.model, where, bits)
        if bits and not self.shape_invariant:
            quantize_linears(self.model, bits)
        weights = [*self.model.parameters(), *self.model.buffers()]
        self.weight_bytes = sum(t.nbytes for t in weights)
        if not self.args.tie_embeddings:  # of an untied embedding a step reads a few rows only
            self.weight_bytes -= self.model.tok_embeddings.weight.nbytes
        self.load_seconds = time.perf_counter() - start
        self.scheduler = Scheduler(
            self.model, eos_ids=self.tokenizer.eos_ids, spec=spec,
            k=(5 if spec == "ngram" else 0) if k is None else k, max_seq_length=max_seq_length,
            prefill_chunk_size=prefill_chunk_size or (64 if self.device == "cpu" else 256),
            device=self.device, compile=compile, **options,
        )  # fmt: skip
        self.compile_seconds = 0.0
        if compile:
            start = time.perf_counter()
            self.scheduler.warm_up()
            self.compile_seconds = time.perf_counter() - start

    def encode(self, prompt: str | list) -> list[int]:
        """Token ids of a text, of messages [{"role", "content"}], or a list of ids as it is."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        messages = prompt and isinstance(prompt[0], dict)
        return self.tokenizer.chat(prompt) if messages else list(prompt)

    def submit(
        self, prompt: str | list, params: SamplingParams, priority: int = 0
    ) -> tuple[Request, TextStream]:
        """Queue one request; run it with `llm.scheduler.step()`, collect it with `result`."""
        text = TextStream(self.tokenizer, params.stop)
        request = Request(self.encode(prompt), params, priority, on_tokens=text.push)
        self.scheduler.add(request)
        return request, text

    def result(self, prompt: str | list, request: Request, text: TextStream) -> Result:
        return Result(
            prompt, request.prompt_token_ids, request.token_ids, text.finish(),
            request.finish_reason, request.stats,
            seconds=request.finish_time - request.prefill_start_time,
            time_to_first_token=request.first_token_time - request.arrival_time,
            prefill_seconds=request.decode_start_time - request.prefill_start_time,
            num_cached_tokens=request.num_cached_tokens,
        )  # fmt: skip

    def generate(
        self, prompts: str | list, params: SamplingParams | list[SamplingParams] | None = None,
        on_result: Callable[[int, Result], str | list | None] | None = None,
    ) -> Result | list[Result]:  # fmt: skip
        """Decode a prompt (a text) or a list of them (texts, id lists, message lists), in order.

        params: one for all or one each. on_result(index, result) is called as each finishes and may
        return a prompt that continues it (the next turn of a conversation); its result then takes
        the place of the first. It also gets prompts that do not fit (finish_reason "refused"),
        while the others go on; without on_result they raise ValueError.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], params, on_result)[0]
        params = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            n = len(params), len(prompts)
            raise ValueError("{} sampling parameters for {} prompts: one, or one each".format(*n))
        running, results = {}, [None] * len(prompts)

        def start(i: int, prompt: str | list) -> None:
            try:
                request, text = self.submit(prompt, params[i])
                running[request] = (i, prompt, text)
            except ValueError as e:
                if on_result is None:
                    raise
                results[i] = Result(prompt, [], [], "", "refused", SpecStats(), error=str(e))
                on_result(i, results[i])

        try:
            for i, prompt in enumerate(prompts):
                start(i, prompt)
            while running:
                for request in self.scheduler.step():
                    if request not in running:
                        continue
                    i, prompt, text = running.pop(request)
                    results[i] = self.result(prompt, request, text)
                    more = on_result(i, results[i]) if on_result else None
                    if more is not None:
                        start(i, more)
        finally:  # an error or Ctrl-C: leave nothing behind in the slots
            for request in running:
                self.scheduler.abort(request)
        return results

    def chat(self, messages: list, params: SamplingParams | list[SamplingParams] | None = None):
        """As `generate`, for one conversation [{"role", "content"}, ...] or a list of them."""
        if messages and isinstance(messages[0], dict):
            return self.generate([messages], params)[0]
        return self.generate(messages, params)

    def stream(
        self, prompt: str | list, params: SamplingParams | None = None
    ) -> Iterator[tuple[str, bool] | Result]:
        """Yield (text, from accepted drafts) as they come, whole characters, then the Result."""
        request, text = self.submit(prompt, params or SamplingParams())
        try:
            while request.state != "finished":
                self.scheduler.step()
                while text.pieces:
                    yield text.pieces.popleft()
            result = self.result(prompt, request, text)
            yield from text.pieces
            yield result
        finally:
            self.scheduler.abort(request)


# -- the command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description="Generate text with lossless n-gram speculative decoding.", allow_abbrev=False
    )
    d, flag = SamplingParams(), argparse.BooleanOptionalAction
    add = p.add_argument
    add("--model", default="smollm2", help="folder, .gguf file or hub repo id (default: smollm2)")
    add("--prompt", help="text to answer, - for standard input (default: a built-in one)")
    add("--prompt_file", help='JSON lines: a string, {"prompt"}, {"messages"} or {"turns"}')
    add("--num_prompts", type=int, help="prompts to take from --prompt_file (default: all)")
    add("--chat", action=flag, help="use the model's chat template (default: if it has one)")
    add("--interactive", action="store_true", help="converse until Ctrl-D (default: off)")
    add("--spec", choices=["none", "ngram"], default="ngram", help="drafts (default: ngram)")
    add("--k", type=int, help="draft tokens per step (default: 5, with --spec none 0)")
    add("--ngram_min", type=int, default=1, help="shortest match, tokens (default: 1)")
    add("--ngram_max", type=int, default=3, help="longest match looked for, tokens (default: 3)")
    n = d.max_new_tokens
    add("--max_new_tokens", type=int, default=n, help=f"output limit, tokens (default: {n})")
    add("--temperature", type=float, default=0.0, help="0: most likely token (default: 0)")
    add("--top_k", type=int, default=d.top_k, help="keep the k likeliest tokens (default: 0, off)")
    add("--top_p", type=float, default=d.top_p, help="keep this probability (default: 1, off)")
    add("--min_p", type=float, default=d.min_p, help="share of the likeliest (default: 0, off)")
    add("--seed", type=int, default=d.seed, help="of the sampling noise, any integer (default: 0)")
    add("--stop", action="append", default=[], help="text that ends the answer (default: none)")
    add("--ignore_eos", action="store_true", help="go on to the limit (default: off)")
    add("--max_batch_size", type=int, default=1, help="requests decoded together (default: 1)")
    add("--max_seq_length", type=int, help="prompt + output, tokens (default: min(2048, model's))")
    add("--dtype", choices=list(DTYPES), default="bfloat16", help="default: bfloat16")
    add("--quantize", choices=list(BITS), default="none", help="weights (default: none)")
    add("--device", help="cpu or cuda (default: cuda if there is one)")
    add("--compile", action=flag, default=True, help="compile the step (default: on)")
    add("--async", action=flag, default=True, dest="run_async", help="run ahead (default: on)")
    add("--prefix_cache", action=flag, default=True, help="reuse shared prefixes (default: on)")
    add("--show_drafts", action="store_true", help="colour accepted draft tokens (default: off)")
    add("--json", action="store_true", help="one JSON object per request on stdout (default: off)")
    add("--print_output", action="store_true", help="texts of --prompt_file (default: off)")
    add("--output", help="file for the JSON objects of --prompt_file (default: none)")
    add("--resume", action="store_true", help="skip what --output holds already (default: off)")
    return p.parse_args(argv)


def peak_memory(device: str) -> float:
    """GiB: of the GPU where the model is on one, else resident memory of the process."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**30
    if sys.platform == "win32":
        return float("nan")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def per(amount: float, seconds: float) -> str:
    return f"{amount / seconds:.1f}" if seconds > 0 else "-"


def print_statistics(llm: LLM, results: list[Result], wall: float) -> None:
    """What speculation did, and what the run cost, on stderr."""
    stats, s = llm.scheduler.stats, llm.scheduler
    n = len(results)
    prefill = sum(r.prefill_seconds for r in results)
    decode = sum(r.seconds for r in results) - prefill if len(s.slots) == 1 else wall
    steps = s.step_launched
    context = sum(len(r.prompt_token_ids) + len(r.token_ids) / 2 for r in results) / max(1, n)
    rows = sum(x[0, :, 0].nbytes for kv in s.buffers.cache.layers for x in kv[1:])  # of one token
    read = llm.weight_bytes + s.occupied / max(1, steps) * context * 2 * rows
    ms = 1e3 * sum(r.time_to_first_token for r in results) / max(1, n)
    rows = [
        ("total_num_output_tokens", stats.total_num_output_tokens),
        ("num_drafts", stats.num_drafts),
        ("num_draft_tokens", stats.num_draft_tokens),
        ("num_accepted_tokens", stats.num_accepted_tokens),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f}  (1 + accepted / drafts)"),
        *((f"acceptance at token {i}", f"{x:.2f}") for i, x in enumerate(stats.acceptance_at)),
        ("tokens per step", f"{stats.tokens_per_step:.2f}  (over all {stats.num_steps} steps)"),
        ("time to first token", f"{ms:.0f} ms" + (" (mean)" if n > 1 else "")),
        ("prefill", f"{per(s.num_prefilled_tokens, prefill)} tokens/s"),
        ("prompt tokens reused", s.num_cached_tokens),
        ("decode", f"{per(stats.total_num_output_tokens, decode)} tokens/s"),
        ("steps", f"{per(steps, decode)} per second"),
        ("read per step", f"{read / 1e6:.0f} MB, {per(read * steps / 1e9, decode)} GB/s"),
        ("batch occupancy", f"{s.occupied / max(1, steps) / len(s.slots):.0%} of {len(s.slots)}"),
        ("device waited for host", f"{s.device.waited / max(wall, 1e-9):.1%} of the time"),
        ("host work per step", f"{1e3 * s.host_seconds / max(1, steps):.2f} ms"),
        ("load, compile", f"{llm.load_seconds:.1f} s, {llm.compile_seconds:.1f} s"),
        ("peak memory", f"{peak_memory(llm.device):.2f} GiB"),
        ("same tokens for", ("fixed k and batch size", "any k or batch")[llm.shape_invariant]),
    ]
    print("\n" + "\n".join(f"{name:>26}: {value}" for name, value in rows), file=sys.stderr)


def answer(llm: LLM, prompt, params: SamplingParams, show_drafts: bool) -> Result:
    """Stream one answer to stdout."""
    for piece in llm.stream(prompt, params):
        if isinstance(piece, Result):
            print(flush=True)
            return piece
        text, drafted = piece
        print(f"\033[32m{text}\033[0m" if drafted and show_drafts else text, end="", flush=True)


def converse(llm: LLM, params: SamplingParams, chat: bool, show_drafts: bool) -> list[Result]:
    messages, results = [], []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return results
        messages.append({"role": "user", "content": line.strip()})
        try:
            results.append(answer(llm, messages if chat else line.strip(), params, show_drafts))
            messages.append({"role": "assistant", "content": results[-1].text})
        except (KeyboardInterrupt, ValueError) as e:  # or the conversation outgrew the slot
            print(f"\n[{str(e) or 'stopped'}]", file=sys.stderr)
            messages.pop()


def run(args: argparse.Namespace) -> None:
    # Everything that can be wrong with the input is found before the model is loaded.
    names = "max_new_tokens temperature top_k top_p min_p seed stop ignore_eos".split()
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    jobs = read_jobs(args.prompt_file, args.num_prompts, params) if args.prompt_file else []
    if not jobs and not args.interactive:
        prompt = DEFAULT_PROMPT if args.prompt is None else args.prompt
        prompt = sys.stdin.read() if prompt == "-" else prompt
        if not prompt:
            raise ValueError("the prompt is empty: give at least one character")
        jobs = [Job(prompt, [], params)]
    names = "model spec k ngram_min ngram_max max_batch_size max_seq_length".split()
    names += "dtype quantize device compile run_async prefix_cache".split()
    print("loading and compiling (the first time takes longer)...", file=sys.stderr)
    llm = LLM(**{name: getattr(args, name) for name in names})
    chat = llm.tokenizer.chat_template is not None if args.chat is None else args.chat
    start = time.perf_counter()
    llm.scheduler.device.waited = llm.scheduler.device.busy_until = 0.0
    try:
        if args.interactive:
            results = converse(llm, params, chat, args.show_drafts)
        elif not args.prompt_file and not args.json:
            results = [answer(llm, as_prompt(jobs[0].prompt, chat), params, args.show_drafts)]
        else:
            def show(line: str, result: Result) -> None:
                if args.json or args.print_output:
                    print(line if args.json else result.text + "\n", flush=True)

            results = run_jobs(llm, jobs, chat, show, args.output, args.resume)
        done = [r for r in results if not r.error]
        print_statistics(llm, done, time.perf_counter() - start)
        if len(done) < len(results):
            raise ValueError(f"{len(results) - len(done)} of {len(results)} prompts were refused")
    finally:
        llm.scheduler.close()


def main(argv: list[str] | None = None) -> int:
    try:
        run(parse_args(argv))
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
