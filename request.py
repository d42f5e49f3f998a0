"""A request: its prompt and sampling parameters, its way through the scheduler, its result."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from spec import SpecStats


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded. Raises ValueError naming the field, the value and the limit."""

    max_new_tokens: int = 256  # tokens, at least 1
    min_new_tokens: int = 0  # no stop token before this many
    temperature: float = 0.0  # 0: argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0
    stop: tuple[str, ...] = ()  # strings that end the text, not part of it
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own
    ignore_eos: bool = False
    k: int | None = None  # drafts per step, at most the scheduler's k (None); 0: no speculation

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        limits = {
            "max_new_tokens": (1, 2**31), "min_new_tokens": (0, self.max_new_tokens),
            "temperature": (0, 1e4), "top_k": (0, 2**31), "top_p": (1e-6, 1), "min_p": (0, 1),
            "seed": (-(2**63), 2**64), "k": (0, 2**31),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "k":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}: must be a number from {low} to {high}")
        if "" in self.stop:
            raise ValueError("stop contains an empty string: give at least one character")


@dataclass(eq=False)
class Request:
    """One prompt on its way through the scheduler, and its result."""

    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower is more urgent
    # Called per step with the new token ids and how many of them were accepted drafts (the leading
    # ones). May return how many to keep, which ends the request ("stop").
    on_tokens: Callable[[list[int], int], int | None] | None = None

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort
    stats: SpecStats = field(default_factory=SpecStats)
    num_cached_tokens: int = 0  # prompt tokens whose KV rows were reused
    num_preemptions: int = 0
    arrival_time: float = 0.0
    prefill_start_time: float = 0.0
    decode_start_time: float = 0.0
    first_token_time: float = 0.0
    finish_time: float = 0.0

    # the scheduler's own view
    state: str = "waiting"  # waiting, prefill, decode, finished
    order: tuple = ()  # (priority, arrival number)
    slot: int | None = None
    num_computed: int = 0  # leading tokens whose KV rows are in the slot, while in prefill
    num_steps_in_flight: int = 0
    num_output_placeholders: int = 0  # 1 + k per step in flight: what may still be delivered
    swapped: tuple[int, list[Tensor]] | None = None  # preempted: number of KV rows, and those

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.token_ids


@dataclass
class Result:
    """One finished request. `text` ends before a stop string; `token_ids` end with the token that
    completed the stop.
    """

    prompt: str | list
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str  # stop, length, abort, refused
    stats: SpecStats
    seconds: float = 0.0  # from the first prefill chunk to the last token
    time_to_first_token: float = 0.0  # seconds, from arrival
    prefill_seconds: float = 0.0
    num_cached_tokens: int = 0
    error: str = ""  # why it was refused
