"""Two runs with the same prompts: where facts, tokens and log probabilities differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .outcome import Book, Outcome

SAME_PROMPTS = ("seed", "lengths", "index_topk", "style_sha256", "chunk_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One probe asked in both runs.

    Attributes:
        facts: same, lost (only the earlier run recalls all), gained, both-lost, or no-answer.
        first_token: index of the first answer token that differs, or None.
        logprob_gap: largest difference of log probabilities before that token; None where one run has none.
    """

    key: str
    facts: str
    first_token: int | None
    logprob_gap: float | None


def check_same(option: str, earlier: Mapping[str, Any], now: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raises: UsageError: a setting that decides the prompts differs."""
    for name in names:
        if earlier.get(name) != now.get(name):
            raise UsageError(option, needs=f"{name} {earlier.get(name)!r}, as in that run", got=repr(now.get(name)))


def differences(earlier: Book, now: Book, least: float) -> list[Difference]:
    """Every probe with the same prompt in both runs, by key."""
    shared = [key for key in now.outcomes if key in earlier.outcomes]
    return [
        _difference(key, earlier.outcomes[key], now.outcomes[key], least)
        for key in shared
        if now.outcomes[key].prompt_sha256 == earlier.outcomes[key].prompt_sha256 or not now.outcomes[key].answered
    ]


def _difference(key: str, earlier: Outcome, now: Outcome, least: float) -> Difference:
    if not (earlier.answered and now.answered):
        return Difference(key=key, facts="no-answer", first_token=None, logprob_gap=None)
    before, after = earlier.passes(least), now.passes(least)
    facts = {(True, True): "same", (True, False): "lost", (False, True): "gained", (False, False): "both-lost"}[
        before, after
    ]
    token, gap = first_difference(earlier, now)
    return Difference(key=key, facts=facts, first_token=token, logprob_gap=gap)


def first_difference(one: Outcome, other: Outcome) -> tuple[int | None, float | None]:
    """Index of the first token that differs, and the largest gap of log probabilities before it."""
    if one.token_kind != other.token_kind:
        return None, None
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    token = next((index for index, (left, right) in pairs if left != right), None)
    if token is None and len(one.tokens) != len(other.tokens):
        token = min(len(one.tokens), len(other.tokens))
    if not (one.logprobs and other.logprobs):
        return token, None
    gaps = [abs(left - right) for left, right in zip(one.logprobs[:token], other.logprobs[:token], strict=False)]
    return token, max(gaps, default=0.0)
