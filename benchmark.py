"""Plain against speculative decoding, side by side: one process, one model, prompt by prompt.

    python benchmark.py
    python benchmark.py --prompt_file prompts.jsonl --num_prompts 20 --json results.json
"""

import argparse
import json
import statistics
import sys
import time

from tqdm import tqdm

from batch import as_prompt, read_jobs
from generate import LLM
from request import Request, SamplingParams
from scheduler import Scheduler

ARTICLE = """The town library of Harrow Bridge reopened on Monday after two years of repairs. The
building, which dates from 1904, was flooded when the river rose in the winter of 2023, and more
than four thousand books were lost. The repairs cost 2.1 million pounds. Most of the money came from
the county, and the rest was raised by the Friends of the Library, a group of two hundred readers
who sold cakes, held concerts and ran a sponsored walk along the river. The new library has a
reading room on the first floor, above the reach of the water, and a room for children with a view
of the bridge. The librarian, Anna Field, said that the number of visitors on the first day was the
highest since records began. "People queued around the corner," she said. The library is open every
day except Sunday, and membership is free for everyone who lives in the county."""
CODE = """def average(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)

def largest(numbers):
    best = numbers[0]
    for number in numbers:
        if number < best:
            best = number
    return best
"""
WORKLOADS = {
    "chat": [
        "What makes bread rise?",
        "Give me three tips for learning a language.",
        "Explain why the sky is blue to a child.",
        "Write a short letter to a landlord.",
    ],
    "summarization": [
        f"Summarize this article:\n\n{ARTICLE}",
        f"List the facts in this text:\n\n{ARTICLE}",
        f"Write a headline and repeat the key sentences:\n\n{ARTICLE}",
    ],
    "code edit": [
        f"Fix the bug in this code and write all of it again:\n\n{CODE}",
        f"Add a docstring to each function and write the whole code:\n\n{CODE}",
        f"Rename `numbers` to `values` everywhere:\n\n{CODE}",
    ],
}


def measure(scheduler: Scheduler, ids: list[int], limit: int) -> Request:
    """Decode one prompt with nothing cached from before."""
    scheduler.slots[0].cached = []
    request = scheduler.add(Request(list(ids), SamplingParams(max_new_tokens=limit)))
    scheduler.run()
    return request


def summary(runs: list[Request]) -> dict:
    """Of one mode's runs: totals, and the median over prompts of a step's time."""
    tokens = sum(len(r.token_ids) for r in runs)
    steps = sum(r.stats.num_steps for r in runs)
    decode = sum(r.finish_time - r.decode_start_time for r in runs)
    prefill = sum(r.decode_start_time - r.prefill_start_time for r in runs)
    each = [1e3 * (r.finish_time - r.decode_start_time) / r.stats.num_steps for r in runs]
    return {
        "decode_tokens_per_s": tokens / decode, "tokens_per_s": tokens / (decode + prefill),
        "tokens_per_step": tokens / steps, "ms_per_step": 1e3 * decode / steps,
        "median_ms_per_step": statistics.median(each), "min_ms_per_step": min(each),
        "max_ms_per_step": max(each),
        "prefill_tokens_per_s": sum(len(r.prompt_token_ids) for r in runs) / prefill,
    }  # fmt: skip


def run_workload(
    modes: dict[str, Scheduler], prompts: list[list[int]], limit: int, name: str
) -> dict:
    runs, same = {mode: [] for mode in modes}, 0
    for ids in tqdm(prompts, name, disable=None, leave=False):
        for mode, scheduler in modes.items():
            runs[mode].append(measure(scheduler, ids, limit))
        same += len({tuple(r[-1].token_ids) for r in runs.values()}) == 1
    table = {mode: summary(r) for mode, r in runs.items()}
    plain = next(iter(table.values()))
    for row in table.values():
        row["speedup"] = row["decode_tokens_per_s"] / plain["decode_tokens_per_s"]
        row["speedup_with_prefill"] = row["tokens_per_s"] / plain["tokens_per_s"]
        row["identical"] = f"{same}/{len(prompts)}"
    return table


def print_table(name: str, table: dict) -> None:
    columns = ("decode tok/s", "speed-up", "with prefill", "tok/step", "ms/step (min-max)")
    columns += ("prefill tok/s", "same ids")
    print(f"\n{name:14}" + "".join(f"{c:>{len(c) + 2}}" for c in columns))
    for mode, r in table.items():
        low, high = r["min_ms_per_step"], r["max_ms_per_step"]
        values = (
            f"{r['decode_tokens_per_s']:.1f}", f"{r['speedup']:.2f}x",
            f"{r['speedup_with_prefill']:.2f}x", f"{r['tokens_per_step']:.2f}",
            f"{r['median_ms_per_step']:.1f} ({low:.0f}-{high:.0f})",
            f"{r['prefill_tokens_per_s']:.0f}", r["identical"],
        )  # fmt: skip
        cells = (f"{v:>{len(c) + 2}}" for v, c in zip(values, columns))
        print(f"{mode:14}" + "".join(cells), flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.add_argument("--model", default="smollm2", help="as generate.py's (default: smollm2)")
    p.add_argument("--prompt_file", help="JSON lines instead of the built-in prompts")
    p.add_argument("--num_prompts", type=int, help="prompts per workload (default: all)")
    p.add_argument("--k", type=int, default=5, help="draft tokens per step (default: 5)")
    p.add_argument("--max_new_tokens", type=int, default=128, help="tokens (default: 128)")
    p.add_argument("--json", help="file for the results (default: none)")
    args = p.parse_args()
    workloads = {name: prompts[: args.num_prompts] for name, prompts in WORKLOADS.items()}
    if args.prompt_file:
        jobs = read_jobs(args.prompt_file, args.num_prompts, SamplingParams())
        workloads = {args.prompt_file: [job.prompt for job in jobs]}
    llm = LLM(args.model, spec="ngram", k=args.k)
    modes = {}
    for mode, spec, k in (("plain", "none", 0), (f"none, k={args.k}", "none", args.k)):
        modes[mode] = Scheduler(llm.model, eos_ids=llm.scheduler.eos_ids, spec=spec, k=k)
        modes[mode].warm_up()
    modes[f"ngram, k={args.k}"] = llm.scheduler
    results, start = {}, time.perf_counter()
    for name, prompts in workloads.items():
        ids = [llm.encode(as_prompt(x, llm.tokenizer.chat_template is not None)) for x in prompts]
        ids = [x for x in ids if len(x) + args.max_new_tokens <= llm.scheduler.max_seq_length]
        results[name] = run_workload(modes, ids, args.max_new_tokens, name)
        print_table(name, results[name])
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
