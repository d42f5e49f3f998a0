"""propose, sample, accept and SpecStats against independent references."""

import random

import pytest
import torch

from spec import SpecStats, accept, keep_mask, propose, sample, seed_halves


def search(text: list[int], k: int, ngram_min: int, ngram_max: int) -> list[int]:
    """Plain Python: longest n first, most recent occurrence, reading on from the draft itself past
    the end.
    """
    for n in range(ngram_max, ngram_min - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if n < len(text) and text[start : start + n] == text[-n:]:
                out = list(text)
                for i in range(k):
                    out.append(out[start + n + i])
                return out[len(text) :]
    return [-1] * k


def propose_one(
    text: list[int], k: int, ngram_min: int, ngram_max: int, size: int = 64
) -> list[int]:
    tokens = torch.full((1, size), 7)  # junk beyond the text must not matter
    tokens[0, : len(text)] = torch.tensor(text)
    return propose(tokens, torch.tensor([len(text)]), k, ngram_min, ngram_max)[0].tolist()


def test_propose_equals_plain_search_on_random_texts():
    rng = random.Random(0)
    for _ in range(1500):
        low = rng.randint(1, 4)
        high, k, vocabulary, B = (
            rng.randint(low, 5),
            rng.randint(1, 7),
            rng.choice([1, 2, 3, 6]),
            rng.randint(1, 4),
        )
        texts = [[rng.randrange(vocabulary) for _ in range(rng.randint(1, 30))] for _ in range(B)]
        tokens = torch.randint(0, vocabulary, (B, 33))
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
        got = propose(tokens, torch.tensor([len(t) for t in texts]), k, low, high).tolist()
        assert got == [search(t, k, low, high) for t in texts], (texts, k, low, high)


@pytest.mark.parametrize(
    "text, low, high, k, expected",
    [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 2, [-1, -1]),
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3], 4, 4, 2, [-1, -1]),
        ([1, 2, 3, 4, 1, 2, 3], 3, 4, 2, [4, 1]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),  # the 4-gram wins over 2 3 4 -> 5
        ([3, 4, 5, 2, 3, 4, 1, 2, 3, 4], 2, 4, 2, [1, 2]),
        (
            [1, 2, 3, 4, 50, 51, 2, 3, 4, 60, 61, 1, 2, 3, 4],
            3,
            4,
            2,
            [50, 51],
        ),  # longer beats more recent
        (
            [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3],
            3,
            3,
            2,
            [300, 1],
        ),  # most recent on ties
        ([1, 2, 3, 4, 5], 2, 2, 2, [-1, -1]),
        ([5, 6], 2, 2, 2, [-1, -1]),
        ([1, 2, 1, 2], 2, 2, 3, [1, 2, 1]),  # reads on from itself
        ([9, 1, 2, 3, 8, 1, 2, 3], 2, 3, 2, [8, 1]),
        ([1, 2, 3, 4, 1], 1, 1, 2, [2, 3]),
        ([7], 1, 3, 2, [-1, -1]),
        ([7, 7], 1, 3, 3, [7, 7, 7]),
    ],
)
def test_propose_fixed_facts(text, low, high, k, expected):
    assert propose_one(text, k, low, high) == expected


def test_propose_up_to_the_end_of_the_buffer():
    assert propose_one([1, 2, 3, 1, 2], 6, 1, 3, size=5) == [3, 1, 2, 3, 1, 2]


def test_accept_counts_leading_matches_and_never_a_missing_draft():
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 2, 3], [-1, -1, -1], [1, -1, -1]])
    sampled = torch.tensor([[1, 2, 3, 4], [1, 5, 3, 4], [1, 2, 3, 4], [0, 0, 0, 0], [1, 2, 0, 0]])
    assert accept(drafts, sampled).tolist() == [3, 1, 0, 0, 1]


def exact(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Reference distribution by sorting, in float64."""
    p = torch.softmax(logits.double() / temperature, 0)
    order = sorted(range(len(p)), key=lambda i: -p[i])
    kept = order[: top_k or len(p)]
    mass, total, nucleus = 0.0, sum(p[i] for i in kept), []
    for i in kept:
        nucleus.append(i)
        mass += p[i] / total
        if mass >= top_p:
            break
    kept = [i for i in nucleus if p[i] >= min_p * p.max()]
    q = torch.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


SETTINGS = [
    (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.9, 6, 0.9, 0.1), (1.0, 1, 1.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", SETTINGS)
def test_sampling_follows_the_exact_distribution(temperature, top_k, top_p, min_p):
    """Chi-square over seeds and positions; no token outside the mask ever appears."""
    torch.manual_seed(1)
    logits, B, T = torch.randn(12) * 1.5, 4000, 5
    filters = (torch.full((B,), top_k), torch.full((B,), top_p), torch.full((B,), min_p))
    seed = torch.tensor([seed_halves(i) for i in range(B)], dtype=torch.int32)
    positions = torch.arange(100, 100 + T).expand(B, T)
    drawn = sample(logits.expand(B, T, -1), positions, torch.full((B,), temperature), seed, filters)
    q = exact(logits, temperature, top_k, top_p, min_p)
    mask = keep_mask(logits[None, None] / temperature, *[f[:1] for f in filters])[0, 0]
    assert mask.tolist() == (q > 0).tolist()
    for counts in (
        torch.bincount(drawn.flatten(), minlength=12),
        torch.bincount(drawn[:, 2], minlength=12),
    ):
        assert counts[q == 0].sum() == 0
        expected = q[q > 0] * counts.sum()
        chi = ((counts[q > 0] - expected) ** 2 / expected).sum().item()
        freedom = max(1, int((q > 0).sum()) - 1)
        assert chi < freedom + 5 * (2 * freedom) ** 0.5 + 5, (counts, expected)


def test_noise_of_neighbouring_positions_and_seeds_is_independent():
    """Pairs of draws follow the product distribution (vLLM 9441: parallel seeds gave related
    texts).
    """
    logits, B = torch.zeros(4), 20000
    seed = torch.tensor([seed_halves(i) for i in range(B)], dtype=torch.int32)
    x = sample(logits.expand(B, 2, -1), torch.arange(2).expand(B, 2), torch.ones(B), seed, None)
    for pairs in (x[:, 0] * 4 + x[:, 1], x[:-1, 0] * 4 + x[1:, 0]):
        counts = torch.bincount(pairs, minlength=16).double()
        expected = len(pairs) / 16
        assert ((counts - expected) ** 2 / expected).sum() < 15 + 5 * 30**0.5


def test_sample_is_a_function_of_seed_and_position_only():
    """Not of the row, the batch or what was drawn before (onnxruntime-genai: generator state and
    rejected rows).
    """
    torch.manual_seed(0)
    logits, seed = torch.randn(3, 4, 50), torch.tensor([seed_halves(7)] * 3, dtype=torch.int32)
    positions, hot = torch.arange(20, 24).expand(3, 4), torch.ones(3)
    logits = logits[:1].expand(3, 4, 50)
    x = sample(logits, positions, hot, seed, None)
    assert (x == x[:1]).all()
    assert x[0, 2] == sample(logits[:1, 2:3], positions[:1, 2:3], hot[:1], seed[:1], None)[0, 0]


def test_temperature_zero_is_argmax_also_beside_sampled_rows():
    logits, seed = torch.randn(2, 3, 40), torch.tensor([seed_halves(1)] * 2, dtype=torch.int32)
    x = sample(logits, torch.arange(3).expand(2, 3), torch.tensor([0.0, 1.0]), seed, None)
    assert x[0].tolist() == logits[0].argmax(-1).tolist()


def test_statistics_count_what_the_user_gets():
    """vLLM's facts: drafts, draft tokens, accepted, per position; undrafted steps count in tokens
    per step.
    """
    stats = SpecStats()
    for emitted, drafted, accepted in [
        (4, 3, 3),
        (2, 3, 1),
        (1, 0, 0),
        (2, 3, 3),
    ]:  # the last was cut by a stop
        stats.add_step(emitted, drafted, accepted)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 9, 6)
    assert stats.accepted_per_position == [3, 2, 1]
    assert stats.mean_acceptance_length == 3.0
    assert stats.tokens_per_step == 9 / 4
