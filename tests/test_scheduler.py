"""The scheduler against a slow reference: one request at a time, one token at a time, nothing
reused.
"""

import random
import threading

import pytest
import torch
from conftest import tiny_model

from model import KVCache, rope_table
from request import Request, SamplingParams
from scheduler import Scheduler
from spec import sample, seed_halves

SIZE = 96  # max_seq_length of these tests


@torch.no_grad()
def reference(model, prompt, params: SamplingParams, eos_ids) -> tuple[list[int], str]:
    """Recompute nothing cleverly: feed one token at a time, draw one token at a time."""
    cache, rope, ids, out = (
        KVCache(model, 1, SIZE, next(model.buffers()).dtype),
        rope_table(model.args, SIZE),
        list(prompt),
        [],
    )
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    filters = (
        torch.tensor([params.top_k]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
    )
    seed = torch.tensor([seed_halves(params.seed)], dtype=torch.int32)
    at = 0
    while True:
        for position in range(at, len(ids)):
            logits = model(
                torch.tensor([[ids[position]]]),
                torch.tensor([[position]]),
                torch.tensor([0]),
                rope,
                cache,
            )
        at = len(ids)
        if len(out) < params.min_new_tokens:
            logits[..., list(stops)] = -torch.inf
        token = sample(
            logits, torch.tensor([[at]]), torch.tensor([params.temperature]), seed, filters
        ).item()
        ids.append(token)
        out.append(token)
        if token in stops:
            return out, "stop"
        if len(out) == params.max_new_tokens:
            return out, "length"


def random_params(rng: random.Random) -> SamplingParams:
    hot = rng.random() < 0.5
    limit = rng.choice([1, 2, 3, 5, 12, 25])
    return SamplingParams(
        max_new_tokens=limit,
        min_new_tokens=rng.choice([0, 0, min(3, limit)]),
        temperature=rng.choice([0.5, 1.0]) if hot else 0.0,
        top_k=rng.choice([0, 5]) if hot else 0,
        top_p=rng.choice([1.0, 0.8]) if hot else 1.0,
        seed=rng.randrange(5),
        stop_token_ids=tuple(rng.sample(range(64), rng.choice([0, 2]))),
        ignore_eos=rng.random() < 0.5,
        k=rng.choice([None, None, 0, 2]),
    )


def random_prompt(rng: random.Random, texts: list[list[int]]) -> list[int]:
    kind = rng.random()
    if kind < 0.3 and texts:  # shares a prefix with an earlier one, or is one
        base = rng.choice(texts)
        return base[: rng.randint(1, len(base))] + [
            rng.randrange(64) for _ in range(rng.randint(0, 3))
        ]
    if kind < 0.6:  # a loop
        period = [rng.randrange(64) for _ in range(rng.randint(1, 3))]
        return (period * 20)[: rng.randint(1, 40)]
    return [rng.randrange(64) for _ in range(rng.randint(1, 40))]


def check_clean(scheduler: Scheduler) -> None:
    """Every slot free, every placeholder settled, nothing queued."""
    assert not scheduler.in_flight and not scheduler.waiting and scheduler.unfinished == 0
    scheduler.device.submit(lambda: None).result()  # the last deactivations may still be queued
    assert not scheduler.buffers.active.any()
    assert all(s.request is None and s.free_after <= scheduler.step_read for s in scheduler.slots)


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_equal_the_slow_reference(model, seed):
    """Arrivals, lengths, mixed sampling, stops, aborts, priorities with preemption, shared
    prefixes; B, k, chunks.
    """
    rng = random.Random(seed)
    eos = rng.sample(range(64), 2)
    scheduler = Scheduler(
        model, eos_ids=eos, spec=rng.choice(["ngram", "ngram", "none"]), k=rng.randint(0, 5),
        ngram_max=rng.randint(1, 4), max_batch_size=rng.randint(1, 8), max_seq_length=SIZE,
        prefill_chunk_size=rng.choice([1, 4, 7, 16, 64]), max_prefill_tokens=rng.choice([1, 5, 16, 256]),
        run_async=rng.random() < 0.6, prefix_cache=rng.random() < 0.7, compile=False,
    )  # fmt: skip
    requests, texts, todo = [], [], rng.randint(5, 25)
    aborted = set()
    while todo or scheduler.unfinished:
        for _ in range(rng.choice([0, 0, 1, 1, 3]) if todo else 0):
            todo -= 1
            prompt = random_prompt(rng, texts)
            texts.append(prompt)
            requests.append(
                scheduler.add(
                    Request(prompt, random_params(rng), priority=rng.choice([0, 0, 0, 1, -1]))
                )
            )
            if todo == 0:
                break
        if requests and rng.random() < 0.1:
            victim = rng.choice(requests)
            if victim.state != "finished":
                aborted.add(victim)
            scheduler.abort(victim)
        if rng.random() < 0.08:
            running = [s.request for s in scheduler.slots if s.request]
            if running:
                scheduler.preempt(rng.choice(running))
        for done in scheduler.step():
            texts.append(done.tokens[: SIZE // 2])
    scheduler.step()
    for r in requests:
        expected, reason = reference(model, r.prompt_token_ids, r.params, eos)
        assert r.num_output_placeholders == 0 and r.num_steps_in_flight == 0
        if r in aborted:
            assert r.finish_reason == "abort" and r.token_ids == expected[: len(r.token_ids)]
        else:
            assert (r.token_ids, r.finish_reason) == (expected, reason), r
    check_clean(scheduler)
    scheduler.close()


def simple(model, **options) -> Scheduler:
    return Scheduler(
        model, **{"compile": False, "max_seq_length": SIZE, "max_batch_size": 2, **options}
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("run_async", [False, True])
def test_max_new_tokens_is_scheduled_exactly(model, limit, run_async):
    """Without drafts a request takes exactly max_new_tokens steps, none wasted ahead (vLLM
    test_async_scheduler).
    """
    scheduler = simple(model, spec="none", k=2, run_async=run_async)
    requests = [scheduler.add(Request([5, 6, 7], SamplingParams(max_new_tokens=limit)))]
    scheduler.step()
    requests.append(scheduler.add(Request([8, 9], SamplingParams(max_new_tokens=limit))))
    scheduler.run()
    assert [len(r.token_ids) for r in requests] == [limit, limit]
    assert [r.stats.num_steps for r in requests] == [limit, limit]
    assert scheduler.occupied == 2 * limit


def test_ten_requests_aborted_in_a_mixed_order_with_steps_in_flight(model):
    """vLLM: the request aborted i-th has the tokens delivered by then, no more, and the others are
    unaffected.
    """
    scheduler = simple(model, spec="none", k=0, max_batch_size=10)
    requests = [
        scheduler.add(Request([i + 1, i + 2], SamplingParams(max_new_tokens=20))) for i in range(10)
    ]
    scheduler.step()
    scheduler.step()
    for i, victim in enumerate([0, 8, 3, 1, 6, 4, 2, 5, 7, 9]):
        assert len(requests[victim].token_ids) == i + 1
        scheduler.abort(requests[victim])
        scheduler.step()
        assert len(requests[victim].token_ids) == i + 1
    scheduler.step()
    assert all(r.finish_reason == "abort" and r.num_output_placeholders == 0 for r in requests)
    check_clean(scheduler)


def test_a_more_urgent_request_preempts_and_the_victim_resumes(model):
    scheduler = simple(model, max_batch_size=1)
    slow = scheduler.add(Request([1, 2, 3, 4], SamplingParams(max_new_tokens=20), priority=1))
    for _ in range(4):
        scheduler.step()
    urgent = scheduler.add(Request([9, 8], SamplingParams(max_new_tokens=4)))
    scheduler.run()
    assert slow.num_preemptions == 1 and urgent.finish_time < slow.finish_time
    for r in (slow, urgent):
        assert r.token_ids == reference(model, r.prompt_token_ids, r.params, [])[0]


def test_equal_prompts_that_arrive_together_are_prefilled_once(model):
    scheduler, prompt = simple(model, prefill_chunk_size=8), list(range(1, 41))
    a, b = [scheduler.add(Request(prompt, SamplingParams(max_new_tokens=3))) for _ in range(2)]
    scheduler.run()
    assert scheduler.num_prefilled_tokens == 39 and b.num_cached_tokens == 39
    assert a.token_ids == b.token_ids == reference(model, prompt, a.params, [])[0]


def test_a_second_turn_reuses_the_first_with_its_answer(model):
    scheduler = simple(model)
    first = scheduler.add(Request(list(range(1, 30)), SamplingParams(max_new_tokens=10)))
    scheduler.run()
    turn = first.tokens + [50, 51, 52]
    second = scheduler.add(Request(turn, SamplingParams(max_new_tokens=10)))
    scheduler.run()
    assert second.num_cached_tokens == len(first.tokens) - 1
    assert second.token_ids == reference(model, turn, second.params, [])[0]


def test_a_fully_cached_prompt_still_decodes_its_last_token(model):
    """nano-vllm 144 and 199: a prompt that is cached in full, and one that is a multiple of the
    block, crashed.
    """
    scheduler, prompt = simple(model, prefill_chunk_size=16, max_batch_size=1), list(range(1, 33))
    a, b = [scheduler.add(Request(prompt, SamplingParams(max_new_tokens=5))) for _ in range(2)]
    scheduler.run()
    assert b.num_cached_tokens == 31 and a.token_ids == b.token_ids


def test_a_prompt_beyond_the_slot_is_refused_with_both_numbers_and_others_go_on(model):
    scheduler = simple(model)
    fine = scheduler.add(Request([1, 2, 3], SamplingParams(max_new_tokens=5)))
    with pytest.raises(ValueError, match=r"90 tokens \+ max_new_tokens 7 .*96"):
        scheduler.add(Request([1] * 90, SamplingParams(max_new_tokens=7)))
    scheduler.run()
    assert fine.finish_reason == "length"


def test_the_cache_may_end_inside_a_draft(model):
    """vLLM 42533, 16087: drafts past max_model_len."""
    scheduler = simple(model, k=5, max_batch_size=1)
    r = scheduler.add(Request([7] * 60, SamplingParams(max_new_tokens=SIZE - 60)))
    scheduler.run()
    assert (
        len(r.tokens) == SIZE
        and r.token_ids == reference(model, r.prompt_token_ids, r.params, [])[0]
    )


def test_a_shorter_second_request_on_a_used_slot(model):
    """llama.cpp 27852, 21233: the slot's earlier text must not draft for, or be read by, the next
    request.
    """
    scheduler = simple(model, max_batch_size=1)
    scheduler.add(Request([3, 1, 4, 1, 5] * 10, SamplingParams(max_new_tokens=20)))
    r = scheduler.add(Request([3, 1], SamplingParams(max_new_tokens=20)))
    scheduler.run()
    assert r.token_ids == reference(model, [3, 1], r.params, [])[0]


def test_cancel_and_retry_with_a_shared_prefix_leaves_others_alone(model):
    """SGLang 23392: shared prefix, cancellation and retry corrupted the KV rows of unrelated
    requests.
    """
    scheduler, prefix = (
        simple(model, max_batch_size=3, prefill_chunk_size=4, max_prefill_tokens=4),
        list(range(1, 30)),
    )
    other = scheduler.add(Request([9, 9, 8], SamplingParams(max_new_tokens=40)))
    for i in range(8):
        victim = scheduler.add(Request(prefix + [i], SamplingParams(max_new_tokens=10)))
        for _ in range(i):
            scheduler.step()
        scheduler.abort(victim)
    retry = scheduler.add(Request(prefix + [63], SamplingParams(max_new_tokens=10)))
    scheduler.run()
    for r in (other, retry):
        assert r.token_ids == reference(model, r.prompt_token_ids, r.params, [])[0]


@pytest.mark.parametrize("cap, reason, n", [(5, "stop", 3), (2, "length", 2), (3, "stop", 3)])
def test_the_earlier_of_stop_and_limit_inside_an_accepted_run_wins(
    model, cap, reason, n, monkeypatch
):
    """SGLang 31599: the cap was checked before the stop: wrong reason, tokens after the stop
    leaked.
    """
    runs = (
        ([t] * 3, reference(model, [t] * 3, SamplingParams(max_new_tokens=6), [])[0])
        for t in range(64)
    )
    prompt, run = next((p, out) for p, out in runs if len(set(out[:3])) == 3)
    monkeypatch.setattr(
        "scheduler.propose", lambda tokens, length, k, *_: torch.tensor([run[:k]])
    )  # all right
    scheduler = simple(model, k=5, max_batch_size=1)
    r = scheduler.add(Request(prompt, SamplingParams(max_new_tokens=cap, stop_token_ids=(run[2],))))
    scheduler.run()
    assert r.stats.num_steps == 1
    assert (r.token_ids, r.finish_reason) == (run[:n], reason)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "prompt", [[3], [7] * 20, [1, 2] * 10, [1, 2, 3] * 8, [5, 1, 2, 9, 5, 1, 2]]
)
def test_ngram_equals_none_for_every_k(model, k, temperature, prompt):
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=11)
    scheduler = simple(model, k=k, max_batch_size=1)
    r = scheduler.add(Request(prompt, params))
    scheduler.run()
    assert r.token_ids == reference(model, prompt, params, [])[0]


@pytest.mark.parametrize("name", ["wrong", "right", "missing", "mixed", "zero"])
def test_no_draft_changes_a_token(model, name, monkeypatch):
    """Adversarial drafts: always wrong, always right, none, right until the middle, token 0."""
    params = SamplingParams(max_new_tokens=24)
    expected = reference(model, [4, 5, 6], params, [])[0]
    truth = torch.tensor([4, 5, 6] + expected + [0] * 8)

    def propose(tokens, length, k, *ngrams):
        right = truth[(length[:, None] + torch.arange(k)).clamp(max=len(truth) - 1)]
        wrong = (right + 1) % 64
        middle = torch.where(torch.arange(k) < k // 2, right, wrong)
        return {
            "wrong": wrong,
            "right": right,
            "missing": right * 0 - 1,
            "mixed": middle,
            "zero": right * 0,
        }[name]

    monkeypatch.setattr("scheduler.propose", propose)
    scheduler = simple(model, k=4, max_batch_size=1)
    r = scheduler.add(Request([4, 5, 6], params))
    scheduler.run()
    assert r.token_ids == expected
    if name == "right":
        assert r.stats.num_steps == 5 and r.stats.tokens_per_step == 24 / 5
    if name == "missing":
        assert r.stats.num_drafts == r.stats.num_draft_tokens == 0


def test_on_tokens_may_end_a_request_and_nothing_follows(model):
    scheduler, seen = simple(model, k=3, max_batch_size=1), []

    def stop(new, accepted):
        seen.extend(new)
        return len(new) - (len(seen) - 7) if len(seen) >= 7 else None

    r = scheduler.add(Request([7] * 20, SamplingParams(max_new_tokens=50), on_tokens=stop))
    scheduler.run()
    scheduler.step()
    assert (
        len(r.token_ids) == 7 and r.finish_reason == "stop" and r.stats.total_num_output_tokens == 7
    )
    assert r.token_ids == reference(model, [7] * 20, r.params, [])[0][:7]
    check_clean(scheduler)


def test_an_exception_inside_a_step_reaches_the_caller_and_nothing_hangs(model, monkeypatch):
    scheduler = simple(model)
    scheduler.add(Request([1, 2, 3], SamplingParams(max_new_tokens=9)))

    def fail(*args):
        raise RuntimeError("boom")

    monkeypatch.setattr("scheduler.decode_step", fail)
    worker = threading.Thread(
        target=lambda: pytest.raises(RuntimeError, scheduler.run, match="boom")
    )
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    scheduler.close()


def test_parameters_out_of_range_are_named():
    for wrong in ({"max_new_tokens": 0}, {"top_p": 0}, {"top_p": 1.5}, {"temperature": -1}, {"min_p": 2}, {"top_k": -1},
                  {"k": -1}, {"min_new_tokens": 9, "max_new_tokens": 3}, {"stop": ("",)}, {"temperature": float("nan")}):  # fmt: skip
        name = next(iter(wrong))
        with pytest.raises(ValueError, match=name):
            SamplingParams(**wrong)


def test_memory_stays_flat_over_many_requests():
    """Nothing is kept of finished requests: the number of live tensors after 40 requests is that
    after 20.
    """
    import gc

    scheduler, counts = simple(tiny_model(), max_batch_size=4), []
    for _ in range(2):
        for i in range(20):
            scheduler.add(Request([i + 1, 2, 3], SamplingParams(max_new_tokens=4)))
        scheduler.run()
        gc.collect()
        counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
    assert counts[0] == counts[1]
