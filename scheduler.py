"""Batched decoding over static slots, one step ahead of its results.

B slots hold B requests at most. All state that a decode step needs lives in preallocated tensors on
the device and is changed there; the host only learns of it when a step's results arrive. Device
work is a queue of jobs executed in order, so the host may queue step i + 1 before it reads step i
(after vLLM's async scheduling, PR 24799).
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType

import torch
from torch import Tensor

import cpu_kernels
from model import KVCache, Transformer, rope_table
from request import Request
from spec import SpecStats, accept, propose, sample, seed_halves


class Slots:
    """The static device buffers of B slots (B, S as in model.py; V vocabulary entries)."""

    def __init__(self, model: Transformer, batch_size: int, max_seq_length: int, k: int, device):
        args, B = model.args, batch_size
        weights = [t for t in model.parameters() if t.dim() > 1]
        dtype = model.kv_dtype or weights[0].dtype
        # Room for a row at its limit to write 1 + k rows; the very last is scratch.
        self.cache = KVCache(model, B, max_seq_length + k + 1, dtype, device)
        self.size = size = self.cache.size
        self.rope = rope_table(args, size, device)

        def zeros(*shape, dtype=torch.int64):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.index = torch.arange(B, device=device)
        self.tokens = zeros(B, size)  # [B, S]
        self.length = zeros(B) + 1  # tokens known; the KV row of the last one is not computed yet
        self.limit = zeros(B) + 1  # length at which the row ends
        self.min_length = zeros(B)  # no stop token below this length
        self.active = zeros(B, dtype=torch.bool)
        self.spec_k = zeros(B)
        self.temperature = zeros(B, dtype=torch.float32)
        self.seed = zeros(B, 2, dtype=torch.int32)
        self.top_k = zeros(B)
        self.top_p = zeros(B, dtype=torch.float32) + 1
        self.min_p = zeros(B, dtype=torch.float32)
        self.stops = zeros(B, args.vocab_size, dtype=torch.bool)  # [B, V]

    def set(self, slot: int, tokens: list[int], prompt_length: int, params, stops, k: int) -> None:
        """Load a request into a slot, not yet active."""
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens)
        self.length[slot] = len(tokens)
        self.limit[slot] = prompt_length + params.max_new_tokens
        self.min_length[slot] = prompt_length + params.min_new_tokens
        self.spec_k[slot] = k
        self.temperature[slot] = params.temperature
        self.seed[slot] = torch.tensor(seed_halves(params.seed), dtype=torch.int32)
        self.top_k[slot], self.top_p[slot] = params.top_k, params.top_p
        self.min_p[slot] = params.min_p
        self.stops[slot] = False
        self.stops[slot, stops] = True

    def rows(self, slot: int, n: int) -> list[Tensor]:
        """Views of the slot's first n KV rows (of the keys whole pages), layer by layer."""
        pages = -(-n // self.cache.page)
        return [x for k, v in self.cache.layers for x in (k[slot, :, :pages], v[slot, :, :n])]

    def copy_rows(self, source: int, target: int, n: int) -> None:
        for x, y in zip(self.rows(target, n), self.rows(source, n)):
            x.copy_(y)

    def swap_out(self, slot: int, n: int) -> list[Tensor]:
        return [x.to("cpu", copy=True) for x in self.rows(slot, n)]

    def swap_in(self, slot: int, n: int, rows: list[Tensor]) -> None:
        for x, y in zip(self.rows(slot, n), rows):
            x.copy_(y)


def decode_step(
    model, s: Slots, k: int, ngrams: tuple[int, int, int] | None, sampling: bool, masking: bool
) -> Tensor:
    """One step of all slots: propose, run 1 + k rows each, sample, accept, advance. Static shapes,
    no host sync.

    ngrams: (ngram_min, ngram_max, per_match) of propose, None to draft nothing; sampling, masking:
    whether any slot has a temperature, any a top_k, top_p, min_p or min_new_tokens. -> [B, 1 + k +
    4] int64: the sampled tokens, then the numbers emitted, drafted and accepted, then whether the
    last emitted token is a stop (2), the limit (1) or neither (0).
    """
    column = torch.arange(1 + k, device=s.length.device)
    remaining = s.limit - s.length
    if ngrams and k:
        drafts = propose(s.tokens, s.length, k, *ngrams)  # [B, k]
        # A draft beyond the last token that may still be emitted could not gain anything.
        usable = column[:k] < torch.minimum(s.spec_k, remaining - 1)[:, None]
        drafts = torch.where(usable & s.active[:, None], drafts, -1)
    else:
        drafts = torch.full_like(s.tokens[:, :k], -1)
    rows = torch.cat([s.tokens.gather(1, s.length[:, None] - 1), drafts], 1)  # [B, 1 + k]
    used = s.active[:, None] & (rows >= 0)
    positions = torch.where(used, s.length[:, None] - 1 + column, -1)
    logits = model(rows.clamp(min=0), positions, s.index, s.rope, s.cache)  # [B, 1 + k, V]
    out = s.length[:, None] + column  # [B, 1 + k]: the position of each drawn token
    if masking:
        early = s.stops[:, None] & (out < s.min_length[:, None])[..., None]
        logits = torch.where(early, -torch.inf, logits)
    if sampling:
        filters = (s.top_k, s.top_p, s.min_p) if masking else None
        sampled = sample(logits, out, s.temperature, s.seed, filters)
    else:
        sampled = logits.argmax(-1)
    accepted = accept(drafts, sampled)  # [B]
    stop = s.stops.gather(1, sampled)  # [B, 1 + k]
    first_stop = torch.where(stop, column, k + 1).amin(1)
    emitted = torch.minimum(torch.minimum(accepted + 1, first_stop + 1), remaining) * s.active
    stopped = first_stop < emitted
    finished = torch.where(stopped, 2, (emitted == remaining).long()) * s.active
    target = torch.where(column < emitted[:, None], out, s.size - 1)
    s.tokens.scatter_(1, target, sampled)
    s.length.add_(emitted)
    s.active.logical_and_(finished == 0)
    drafted = (drafts >= 0).sum(1)
    return torch.cat([sampled, torch.stack([emitted, drafted, accepted, finished], 1)], 1)


def prefill_chunk(model, s: Slots, chunk: int, slot: Tensor, start: Tensor, end: Tensor) -> None:
    """Compute the KV rows start..min(start + chunk, end) - 1 of a slot. slot, start, end [1]."""
    positions = start[:, None] + torch.arange(chunk, device=start.device)  # [1, chunk]
    tokens = s.tokens[slot].gather(1, positions.clamp(max=s.size - 1))
    positions = torch.where(positions < end[:, None], positions, -1)
    model(tokens, positions, slot, s.rope, s.cache, want_logits=False)


def compile_step(function: Callable) -> Callable:
    """torch.compile for one model, one set of buffers and one set of static arguments.

    All that a guard could check (objects, shapes, dtypes) is fixed by construction, so there are
    none to evaluate: 0.8 ms of a 20 ms step. The fresh code object keeps this compilation apart
    from those of other schedulers.
    """
    fresh = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options = {"guard_filter_fn": lambda guards: [False] * len(guards), "size_asserts": False}
    return torch.compile(fresh, fullgraph=True, dynamic=False, options=options)


@lru_cache(maxsize=1)
def device_thread() -> ThreadPoolExecutor:
    """The one thread for all device work: a second one would bring its own OpenMP workers."""
    threads = torch.get_num_threads()
    return ThreadPoolExecutor(1, "device", initializer=lambda: torch.set_num_threads(threads))


class Device:
    """Executes jobs in order, on one thread that runs ahead of the host (run_async) or is waited
    for, job by job.
    """

    def __init__(self, run_async: bool):
        cpu_kernels.release_threads()
        self.pool, self.run_async = device_thread(), run_async
        self.busy_until = 0.0  # when the last job ended
        self.waited = 0.0  # seconds between jobs
        self.seconds = Counter()  # in jobs, by the name of the function

    def _run(self, function, *args):
        start = time.perf_counter()
        if self.busy_until:
            self.waited += start - self.busy_until
        with torch.no_grad():
            result = function(*args)
        self.busy_until = time.perf_counter()
        self.seconds[function.__name__] += self.busy_until - start
        return result

    def submit(self, function, *args) -> Future:
        future = self.pool.submit(self._run, function, *args)
        if not self.run_async:
            wait([future])
        return future


@dataclass(eq=False)
class Slot:
    """The host's view of one slot."""

    index: int
    request: Request | None = None
    cached: list[int] = field(default_factory=list)  # when free: tokens whose KV rows are there
    free_after: int = 0  # the step that must have been read before the slot is handed out again
    last_used: int = 0


def shared_prefix(a: list[int], b: list[int]) -> int:
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    return min(len(a), len(b)) if n is None else n


class Scheduler:
    """Runs requests in B slots: `add`, `abort`, `step` until `unfinished` is 0, or `run`.

    model: a Transformer ready to run (packed, on its device). spec: "ngram" or "none"; k drafts per
    step (rows per slot: 1 + k), at most `per_match` per matched token (0: always k).
    max_seq_length: tokens per slot, prompt and output. max_prefill_tokens: prompt tokens computed
    per iteration while others decode. compile: whether to compile the step with
    torch.compile(fullgraph=True).
    """

    def __init__(
        self, model: Transformer, *, eos_ids: list[int] = (), spec: str = "ngram", k: int = 5,
        ngram_min: int = 1, ngram_max: int = 3, per_match: int = 2, max_batch_size: int = 1,
        max_seq_length: int = 2048, prefill_chunk_size: int = 64, max_prefill_tokens: int = 256,
        run_async: bool = True, prefix_cache: bool = True, compile: bool = True, device="cpu",
    ):  # fmt: skip
        lowest = dict(k=0, ngram_min=1, ngram_max=ngram_min, per_match=0, max_batch_size=1)
        lowest |= dict(max_seq_length=2, prefill_chunk_size=1, max_prefill_tokens=1)
        given = locals()
        for name, low in lowest.items():
            value = given[name]
            if value < low:
                raise ValueError(f"{name} is {value}: must be at least {low}")
        if spec not in ("ngram", "none"):
            raise ValueError(f"spec is {spec!r}: must be 'ngram' or 'none'")
        self.model, self.k, self.max_seq_length = model, k, max_seq_length
        self.eos_ids, self.prefix_cache = list(eos_ids), prefix_cache
        self.ngrams = (ngram_min, ngram_max, per_match) if spec == "ngram" else None
        self.chunk, self.max_prefill_tokens = prefill_chunk_size, max_prefill_tokens
        self.slots = [Slot(i) for i in range(max_batch_size)]
        self.device, self.run_async = Device(run_async), run_async
        sizes = max_batch_size, max_seq_length, k
        self.buffers = self.device.submit(Slots, model, *sizes, device).result()
        self.compile, self.steps = compile, {}  # steps: by whether any request samples, any masks
        self.waiting: list[Request] = []
        self.in_flight: deque[tuple[int, Future, list[Request]]] = deque()
        self.step_launched = self.step_read = self.arrivals = self.occupied = 0
        self.done: list[Request] = []  # finished since the last step() returned
        self.stats = SpecStats()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_prefilled_tokens = 0
        self.host_seconds = 0.0

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + sum(s.request is not None for s in self.slots)

    def warm_up(self) -> None:
        """Compile the greedy step (or load it from the disk cache) before the first request."""
        self._launch_decode([]).result()

    def add(self, request: Request) -> Request:
        """Queue a request. ValueError: no prompt, token out of range, prompt + limit too long."""
        prompt, limit = request.prompt_token_ids, request.params.max_new_tokens
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if not all(0 <= t < self.model.args.vocab_size for t in (min(prompt), max(prompt))):
            raise ValueError(f"prompt token ids must be 0..{self.model.args.vocab_size - 1}")
        if len(prompt) + limit > self.max_seq_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_new_tokens {limit} exceeds max_seq_length "
                f"{self.max_seq_length}: shorten the prompt, lower max_new_tokens or raise "
                "max_seq_length"
            )
        if any(not 0 <= t < self.model.args.vocab_size for t in request.params.stop_token_ids):
            raise ValueError(f"stop_token_ids must be 0..{self.model.args.vocab_size - 1}")
        request.order, request.arrival_time = (request.priority, self.arrivals), time.perf_counter()
        self.arrivals += 1
        self.num_prompt_tokens += len(prompt)
        self.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request in any state; tokens already delivered stay, none follow."""
        if request.state == "waiting":
            self.waiting.remove(request)
        if request.state != "finished":
            self._finish(request, "abort")

    def step(self) -> list[Request]:
        """Admit, prefill, launch a decode step, read one that is done. -> requests it finished."""
        begin, waited = time.perf_counter(), 0.0
        busy = 0 if self.run_async else self.device.seconds.total()
        self._admit()
        self._prefill()
        # A step in flight yields a token at least: launch none that a request cannot need.
        runs = [
            r for r in self._running("decode")
            if len(r.token_ids) + r.num_steps_in_flight < r.params.max_new_tokens
        ]  # fmt: skip
        if runs:
            self._launch_decode(runs)
        while self.in_flight and len(self.in_flight) > (1 if self.run_async and runs else 0):
            start = time.perf_counter()
            self.in_flight[0][1].exception()  # wait; raised below, when it is read
            waited += time.perf_counter() - start
            self._read()
        if not self.run_async:  # it waited for every job
            waited = self.device.seconds.total() - busy
        self.host_seconds += time.perf_counter() - begin - waited
        done, self.done = self.done, []
        return done

    def run(self) -> None:
        while self.unfinished:
            self.step()

    def close(self) -> None:
        """Wait for what is in flight; abort the rest."""
        self.in_flight.clear()
        for request in [*self.waiting, *(s.request for s in self.slots if s.request)]:
            self.abort(request)
        self.device.submit(lambda: None).result()

    def _running(self, state: str) -> list[Request]:
        return [s.request for s in self.slots if s.request is not None and s.request.state == state]

    def _cached(self, slot: Slot) -> list[int]:
        """Leading tokens whose KV rows are (or, by the order of the queue, will be) in the slot."""
        r = slot.request
        if r is None:
            return slot.cached
        return r.tokens[:-1] if r.state == "decode" else r.tokens[: r.num_computed]

    def _admit(self) -> None:
        self.waiting.sort(key=lambda r: r.order)
        while self.waiting:
            request = self.waiting[0]
            free = [s for s in self.slots if s.request is None and s.free_after <= self.step_read]
            if not free:
                if any(s.request is None for s in self.slots):
                    return  # a slot is about to be free
                worst = max((s.request for s in self.slots), key=lambda r: r.order)
                if worst.priority <= request.priority:
                    return
                self.preempt(worst)
                continue
            self.waiting.pop(0)
            wanted = request.prompt_token_ids if self.prefix_cache else []
            slot = max(free, key=lambda s: (shared_prefix(s.cached, wanted), -s.last_used))
            self._place(request, slot)

    def _place(self, request: Request, slot: Slot) -> None:
        params = request.params
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)]
        k = self.k if params.k is None else min(params.k, self.k)
        prompt_length = len(request.prompt_token_ids)
        values = request.tokens, prompt_length, params, stops, k
        self.device.submit(self.buffers.set, slot.index, *values)
        request.state, request.slot, request.num_computed = "prefill", slot.index, 0
        if request.swapped is not None:  # resumed: its rows come back bit for bit
            self.device.submit(self.buffers.swap_in, slot.index, *request.swapped)
            request.num_computed, request.swapped = request.swapped[0], None
        elif self.prefix_cache:
            shared = shared_prefix(slot.cached, request.prompt_token_ids)
            request.num_computed = min(shared, prompt_length - 1)
            request.num_cached_tokens = request.num_computed
            self.num_cached_tokens += request.num_computed
        slot.request, slot.cached, slot.last_used = request, [], self.step_launched

    def _prefill(self) -> None:
        budget = self.max_prefill_tokens if self._running("decode") else None
        for request in sorted(self._running("prefill"), key=lambda r: r.order):
            if not request.prefill_start_time:
                request.prefill_start_time = time.perf_counter()
                self._reuse(request)
            end = len(request.tokens) - 1  # the last token belongs to the first decode step
            while request.num_computed < end and (budget is None or budget > 0):
                stop = min(end, request.num_computed + min(self.chunk, budget or self.chunk))
                self._launch_prefill(request.slot, request.num_computed, stop)
                self.num_prefilled_tokens += stop - request.num_computed
                budget = None if budget is None else budget - (stop - request.num_computed)
                request.num_computed = stop
            if request.num_computed == end:
                self.device.submit(self._activate, request, request.slot)
                request.state = "decode"

    def _activate(self, request: Request, slot: int) -> None:
        self.buffers.active[slot] = True
        request.decode_start_time = request.decode_start_time or time.perf_counter()

    def _reuse(self, request: Request) -> None:
        """Copy the longest prefix another slot holds: equal prompts together are computed once."""
        if not self.prefix_cache:
            return
        best, prompt = None, request.prompt_token_ids
        for slot in (s for s in self.slots if s.request is not request):
            n = min(shared_prefix(self._cached(slot), prompt), len(prompt) - 1)
            if n > request.num_computed:
                best, new = slot.index, n - request.num_computed
                request.num_computed = n
                request.num_cached_tokens += new
                self.num_cached_tokens += new
        if best is not None:
            self.device.submit(self.buffers.copy_rows, best, request.slot, request.num_computed)

    def _launch_prefill(self, slot: int, start: int, end: int) -> Future:
        values = [torch.tensor([x], device=self.buffers.length.device) for x in (slot, start, end)]
        # Not compiled: a chunk is nearly all GEMM, and one graph less halves the start-up time.
        return self.device.submit(prefill_chunk, self.model, self.buffers, self.chunk, *values)

    def _launch_decode(self, requests: list[Request]) -> Future:
        p = [r.params for r in self._running("decode")]
        sampling = any(x.temperature > 0 for x in p)
        filters = any(x.temperature > 0 and (x.top_k or x.top_p < 1 or x.min_p) for x in p)
        key = sampling, filters or any(x.min_new_tokens for x in p)
        if key not in self.steps:
            self.steps[key] = compile_step(decode_step) if self.compile else decode_step
        static = self.k, self.ngrams, *key
        future = self.device.submit(self.steps[key], self.model, self.buffers, *static)
        if requests:
            self.step_launched += 1
            self.occupied += len(requests)
            for r in requests:
                r.num_steps_in_flight += 1
                r.num_output_placeholders += 1 + self.k
            self.in_flight.append((self.step_launched, future, requests))
        return future

    def _read(self) -> None:
        """Settle the oldest step in flight: deliver its tokens, finish what ended."""
        self.step_read, future, requests = self.in_flight.popleft()
        rows, now = future.result().tolist(), time.perf_counter()
        for r in requests:
            *sampled, emitted, drafted, accepted, finished = rows[r.slot]
            r.num_steps_in_flight -= 1
            r.num_output_placeholders -= 1 + self.k
            if r.state != "decode":  # ended by the host meanwhile: what was in flight is void
                if not r.num_steps_in_flight:
                    r.slot = None
                continue
            new = sampled[:emitted]
            keep = r.on_tokens(new, min(accepted, emitted)) if r.on_tokens else None
            if keep is not None:
                new, finished = new[:keep], 2
            r.first_token_time = r.first_token_time or now
            r.token_ids += new
            for stats in (r.stats, self.stats):
                stats.add_step(len(new), drafted, accepted)
            if finished:
                self._finish(r, "stop" if finished == 2 else "length")

    def _finish(self, request: Request, reason: str) -> None:
        """Free the request's slot, once the steps in flight have been read."""
        slot = None if request.slot is None else self.slots[request.slot]
        if slot is not None and slot.request is request:
            if reason != "length":  # the device may not know
                self.device.submit(self.buffers.active.__setitem__, slot.index, False)
            slot.cached, slot.free_after = self._cached(slot), self.step_launched
            slot.request = None
        request.state, request.finish_reason = "finished", reason
        request.finish_time = time.perf_counter()
        if not request.num_steps_in_flight:
            request.slot = None
        request.swapped = None
        self.done.append(request)

    def preempt(self, request: Request) -> None:
        """Take a request's slot: deliver what is in flight, keep KV rows on the host, requeue."""
        while self.in_flight:
            self._read()
        if request.state not in ("prefill", "decode"):
            return  # it ended with what was in flight
        slot = self.slots[request.slot]
        n = len(self._cached(slot))
        self.device.submit(self.buffers.active.__setitem__, slot.index, False)
        request.swapped = (n, self.device.submit(self.buffers.swap_out, slot.index, n).result())
        slot.cached, slot.request, request.slot = self._cached(slot), None, None
        request.state = "waiting"
        request.num_preemptions += 1
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.order)
