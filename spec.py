"""N-gram speculation as pure tensor functions: propose drafts, sample, accept. Imports torch only;
copy this file.

Everything is batched, of static shape and free of host syncs, so a decode step made of these
functions compiles with fullgraph=True and can be captured in a CUDA graph. B slots, k drafts, V
vocabulary entries, S token positions.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


def propose(
    tokens: Tensor, length: Tensor, k: int, ngram_min: int = 1, ngram_max: int = 3,
    per_match: int = 0,
) -> Tensor:  # fmt: skip
    """Draft k tokens per row by looking up the row's last n tokens in its own text (prompt lookup
    decoding).

    tokens [B, S] integers, of which the first length [B] are known; -> drafts [B, k], -1 where
    there is none. The longest match of ngram_max..ngram_min tokens wins, the most recent one on
    ties (vLLM's Triton proposer, PR 40704). A draft that reaches the end of the text reads on from
    itself, so a loop of any period is drafted in full. per_match: at most so many drafts per
    matched token, 0: always k (a short match is seldom right for long; after SuffixDecoding, where
    drafts are as long as a multiple of the match).
    """
    B, S = tokens.shape
    at = torch.arange(S, device=tokens.device)
    matched = torch.ones_like(tokens, dtype=torch.bool)
    size = torch.zeros_like(tokens)  # [B, S]: tokens ending here that equal the text's last
    for n in range(ngram_max):
        last = tokens.gather(1, (length[:, None] - 1 - n).clamp(min=0))  # [B, 1]
        shifted = F.pad(tokens[:, : S - n], (n, 0), value=-1)  # [B, S]: the token n before
        matched = matched & (shifted == last) & (length[:, None] > n)
        size = size + matched
    usable = (size >= ngram_min) & (at < length[:, None] - 1)  # not the suffix itself
    best = torch.where(usable, size * S + at, -1).amax(1)  # longest first, then most recent
    start = best % S + 1  # the token after the match
    i = torch.arange(k, device=tokens.device)
    period = (length - start).clamp(min=1)
    drafts = tokens.gather(1, (start[:, None] + i % period[:, None]).clamp(max=S - 1))
    found = best[:, None] >= 0
    if per_match:
        found = found & (i < per_match * (best // S)[:, None])
    return torch.where(found, drafts, -1)


def _mix(x: Tensor) -> Tensor:
    """Finalizer of MurmurHash3 on int32 (arithmetic wraps; shifts are made logical by masks)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def seed_halves(seed: int) -> tuple[int, int]:
    """Any integer seed -> two int32, mixed by SplitMix64 so that seeds 0, 1, 2... are unrelated."""
    z = (seed + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    z ^= z >> 31
    return tuple(((z >> shift) & 0xFFFFFFFF) - 2**31 for shift in (0, 32))


def gumbel(seed: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [B, T, V] float32, a pure function of (seed, absolute position, token id): no
    generator state.

    seed [B, 2] int32, from `seed_halves`; positions [B, T] int64.
    """
    position = positions.to(torch.int32)[..., None]
    token = torch.arange(vocab_size, device=seed.device, dtype=torch.int32) * -1640531527
    # Linear keys, mixed twice: nesting more hashes here makes the compiler's work grow
    # exponentially.
    low = position * -1150833019 + seed[:, :1, None]
    high = position * 1540483477 + seed[:, 1:, None]
    h = _mix(_mix(token + low) ^ high)  # [B, T, V]
    # Uniform in (0, 1), as fine as 2^-33 near 0, where the winners' exponentials are; below 1 so
    # that none is infinite.
    u = ((h.to(torch.float32) + 0.5) * 2.0**-32 + 0.5).clamp(2.0**-33, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def keep_mask(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Tokens that top_k, then top_p (of what is left), then min_p leave: bool [B, T, V]. Ties at a
    limit all stay.

    scaled [B, T, V] float32: logits / temperature; top_k [B] (0: off), top_p [B] (1: off), min_p
    [B] (0: off).
    """
    ordered = scaled.sort(dim=-1, descending=True).values
    top, rank = ordered[..., :1], torch.arange(scaled.shape[-1], device=scaled.device)
    k = torch.where(top_k > 0, top_k, scaled.shape[-1])[:, None, None]
    # Fixed point, so that the sums are exact in any order and do not depend on the shape of the
    # step.
    mass = torch.where(rank < k, (torch.exp(ordered - top).double() * 2.0**40).to(torch.int64), 0)
    total = mass.cumsum(-1)
    need = (total[..., -1:].double() * top_p[:, None, None].double()).to(torch.int64)
    nucleus = (total - mass < need) | (top_p >= 1)[:, None, None]  # up to the one that reaches it
    count = ((rank < k) & nucleus).sum(-1, keepdim=True).clamp(min=1)
    keep = scaled >= ordered.gather(-1, count - 1)
    return keep & (scaled >= top + torch.log(min_p)[:, None, None])


def sample(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor,
    filters: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """The token the plain decoder draws at each position, [B, T] int64: argmax, or Gumbel-max where
    temperature > 0.

    logits [B, T, V] float32; positions [B, T] int64, of the tokens drawn; temperature [B] float32;
    seed [B, 2] int32; filters: (top_k [B] int, top_p [B], min_p [B] float32), None to leave all
    three out of the computation.
    """
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    noisy = scaled + gumbel(seed, positions, logits.shape[-1])
    if filters is not None:
        noisy = torch.where(keep_mask(scaled, *filters), noisy, -torch.inf)
    return torch.where(temperature[:, None] > 0, noisy.argmax(-1), logits.argmax(-1))


def accept(drafts: Tensor, sampled: Tensor) -> Tensor:
    """How many leading drafts [B, k] the model would have produced itself, [B]; -1 never matches.

    sampled [B, 1 + k]: sampled[:, i] is drawn after drafts[:, :i]. Emitted are sampled[:, :
    accepted + 1]. For a one-token guess, accepting on equality with the sample has exactly the law
    of rejection sampling.
    """
    return (drafts == sampled[:, :-1]).int().cumprod(1).sum(1)


@dataclass
class SpecStats:
    """Counters of what the user gets: accepted drafts that were cut off by a stop or a limit do not
    count.
    """

    total_num_output_tokens: int = 0
    num_steps: int = 0  # decode steps, with or without a draft
    num_drafts: int = 0  # steps that had at least one draft token
    num_draft_tokens: int = 0  # drafted tokens, padding excluded
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def add_step(self, num_emitted: int, num_draft_tokens: int, num_accepted: int) -> None:
        self.num_steps += 1
        self.total_num_output_tokens += num_emitted
        self.num_drafts += num_draft_tokens > 0
        self.num_draft_tokens += num_draft_tokens
        accepted = min(num_accepted, num_emitted)
        self.num_accepted_tokens += accepted
        self.accepted_per_position += [0] * (num_draft_tokens - len(self.accepted_per_position))
        for i in range(accepted):
            self.accepted_per_position[i] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts: steps without a draft do not count (vLLM's definition)."""
        return 1 + self.num_accepted_tokens / max(1, self.num_drafts)

    @property
    def acceptance_at(self) -> list[float]:
        """Share of the drafts whose token at position i was accepted (and all before it)."""
        return [n / max(1, self.num_drafts) for n in self.accepted_per_position]

    @property
    def tokens_per_step(self) -> float:
        """Output tokens per decode step, undrafted steps included: what speculation really
        gains.
        """
        return self.total_num_output_tokens / max(1, self.num_steps)
