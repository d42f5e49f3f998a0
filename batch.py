"""Many prompts from a file: JSON lines in, conversations run to their end, JSON lines out."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from tqdm import tqdm

from request import Result, SamplingParams


@dataclass
class Job:
    """One line of a prompt file: text or messages, the turns that follow its answer."""

    prompt: str | list[dict]
    later: list[str]
    params: SamplingParams


def read_jobs(path: str, limit: int | None, params: SamplingParams) -> list[Job]:
    """Lines: a string, {"prompt"}, {"messages"} or MT-Bench's {"turns"}; an object's fields of
    SamplingParams override `params`. ValueError names the line and the fault.
    """
    try:
        lines = _local(path).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as e:
        bad = f"byte {e.object[e.start]:#x} at offset {e.start}"
        raise ValueError(f"{path} is not UTF-8 ({bad}): convert it") from None
    except OSError as e:
        raise ValueError(f"cannot read {path} ({e.strerror or e}): check --prompt_file") from None
    jobs, names = [], {f.name for f in fields(SamplingParams)}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            item = item if isinstance(item, dict) else {"prompt": item}
            prompt = item.get("prompt") or item.get("messages") or item.get("turns")
            own = replace(params, **{k: item[k] for k in names & item.keys()})
        except ValueError as e:
            what = "not JSON: " * isinstance(e, json.JSONDecodeError)
            raise ValueError(f"{path} line {number}: {what}{e}") from None
        kinds = {type(x) for x in prompt} if isinstance(prompt, list) else set()
        if not prompt or not isinstance(prompt, str) and kinds not in ({str}, {dict}):
            need = 'a non-empty string, "prompt", "messages" or "turns"'
            raise ValueError(f"{path} line {number}: need {need}")
        first, *later = prompt if kinds == {str} else [prompt]
        jobs.append(Job(first, later, own))
    if not jobs:
        raise ValueError(f"{path} holds no prompts: one JSON value per line")
    return jobs[:limit]


def _local(path: str) -> Path:
    """hf:owner/name -> the first JSON lines file of that data set, fetched from the hub."""
    if not path.startswith("hf:"):
        return Path(path)
    import huggingface_hub as hub

    try:
        names = hub.list_repo_files(path[3:], repo_type="dataset")
        name = next(x for x in names if x.endswith(".jsonl"))
        return Path(hub.hf_hub_download(path[3:], name, repo_type="dataset"))
    except Exception as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        raise ValueError(f"cannot fetch {path} ({reason}): check the name and the network") from e


def json_line(result: Result, index: int, turn: int) -> str:
    row = asdict(result)
    return json.dumps({"index": index, "turn": turn, **row, **row.pop("stats")}, ensure_ascii=False)


def as_prompt(text: str | list, chat: bool) -> str | list[dict]:
    """A text as a user's message where the chat template is used; messages as they are."""
    return [{"role": "user", "content": text}] if chat and isinstance(text, str) else text


def next_turn(result: Result, text: str) -> str | list[dict]:
    """The prompt that goes on with a conversation after its answer."""
    if isinstance(result.prompt, str):
        return f"{result.prompt}{result.text}\n{text}"
    answer = {"role": "assistant", "content": result.text}
    return [*result.prompt, answer, {"role": "user", "content": text}]


def _left_to_do(jobs: list[Job], output: Path) -> list[int]:
    """Indices of the jobs whose last turn is not in the file, which keeps the lines of the rest."""
    kept, ended = {}, set()  # line: object; indices
    for line in output.read_text("utf-8", "replace").split("\n"):
        with suppress(json.JSONDecodeError):  # the last line of an interrupted run may be cut
            kept[line] = json.loads(line)
    for x in kept.values():
        if not isinstance(x, dict) or not {"index", "turn", "error"} <= x.keys():
            raise ValueError(f"{output} holds something else than results: give another name")
        if x["error"] or x["index"] < len(jobs) and x["turn"] == len(jobs[x["index"]].later):
            ended.add(x["index"])
    lines = [line + "\n" for line, x in kept.items() if x["index"] in ended]
    fresh = output.with_name(output.name + ".tmp")
    fresh.write_text("".join(lines), "utf-8")
    fresh.replace(output)
    return [i for i in range(len(jobs)) if i not in ended]


def _append(file, line: str) -> None:
    """Write a whole line, or none of it: OSError names the file and what to do."""
    end, data = file.tell(), line.encode() + b"\n"
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as e:
        with suppress(OSError):
            file.truncate(end)
        name = f"cannot write {file.name} ({e.strerror})"
        raise OSError(f"{name}: make room and go on with --resume; lines so far are kept") from e


def run_jobs(
    llm, jobs: list[Job], chat: bool, show: Callable[[str, Result], None],
    output: str | None = None, resume: bool = False,
) -> list[Result]:  # fmt: skip
    """Run all turns of all jobs on an LLM; show(json line, result) as each finishes.

    output: a file that gets the lines, too, each complete on disk before the next, so that an
    interrupted run loses nothing; with `resume`, jobs whose last turn is there are left out.
    """
    turns, todo, results, start = [0] * len(jobs), list(range(len(jobs))), [], time.perf_counter()
    if resume and output and Path(output).exists():
        todo = _left_to_do(jobs, Path(output))
        print(f"resuming: {len(jobs) - len(todo)} of {len(jobs)} prompts are done", file=sys.stderr)
    total = sum(1 + len(jobs[i].later) for i in todo)
    file = open(output, "ab" if resume else "wb", buffering=0) if output else None
    with file or nullcontext(), tqdm(total=total, unit="prompt", disable=None) as bar:

        def finished(position: int, result: Result) -> str | list[dict] | None:
            index = todo[position]
            line = json_line(result, index, turns[index])
            if file:
                _append(file, line)
            show(line, result)
            if result.error:
                bar.write(f"prompt {index}, turn {turns[index]}: {result.error}", file=sys.stderr)
            results.append(result)
            seconds, s = time.perf_counter() - start, llm.scheduler
            rates = s.num_prompt_tokens / seconds, s.stats.total_num_output_tokens / seconds
            bar.set_postfix_str("in {:.0f}, out {:.0f} tokens/s".format(*rates))
            bar.update()
            turns[index] += 1
            later = [] if result.error else jobs[index].later[turns[index] - 1 :]
            return next_turn(result, later[0]) if later else None

        prompts = [as_prompt(jobs[i].prompt, chat) for i in todo]
        llm.generate(prompts, [jobs[i].params for i in todo], finished)
    return results
