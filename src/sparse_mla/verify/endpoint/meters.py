"""How many tokens text has on a server: from its tokenizer, or from the counts in its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import NotCheckableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .style import Style

_LEAST_WORDS = 8
_BEFORE = "Text:"


class IdMeter:
    """Prompts as token ids: exact whatever the text is. ``tokenize(text, special)`` is the server's."""

    def __init__(self, tokenize: Callable[[str, bool], list[int]], style: Style) -> None:
        self._tokenize = tokenize
        self._known: dict[tuple[str, bool], list[int]] = {}
        self._words = min((self._group(group) for group in style.filler), key=_mean_length)
        if len({tuple(ids) for ids in self._words.values()}) < _LEAST_WORDS:
            raise UsageError(
                "the filler words", needs=f"{_LEAST_WORDS} words that the model's tokenizer tells apart",
                got="the same tokens for all", hint="Give words of its vocabulary with --style.",
            )  # fmt: skip
        self.filler = tuple(self._words)

    def _group(self, group: Sequence[str]) -> dict[str, list[int]]:
        together = self._tokenize(" " + " ".join(group), False)
        if len(together) == len(group):
            return {word: [token] for word, token in zip(group, together, strict=True)}
        words = {word: self._tokenize(f" {word}", False) for word in group}
        single = {word: ids for word, ids in words.items() if len(ids) == 1}
        return single if len(single) >= _LEAST_WORDS else words

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if (text, special) not in self._known:
            self._known[text, special] = self._tokenize(text, special)
        return self._known[text, special]

    def _part_ids(self, parts: Sequence[str]) -> list[list[int]]:
        plain = [self._ids(part, special=False) for part in parts]
        marked = self._ids(parts[0], special=True)
        # Special tokens are wanted before the text (BOS), never in the middle of the prompt.
        if marked[len(marked) - len(plain[0]) :] == plain[0]:
            plain[0] = marked
        return plain

    def costs(self, parts: Sequence[str]) -> list[int]:
        """Tokens of each part."""
        return [len(ids) for ids in self._part_ids(parts)]

    def assemble(
        self, parts: Sequence[str], gaps: Sequence[int], word: Callable[[int], str]
    ) -> tuple[str | list[int], int]:
        """Token ids; the last filler word of a gap may be cut to fit."""
        content: list[int] = []
        for number, ids in enumerate(self._part_ids(parts)):
            content += ids
            end = len(content) + (gaps[number] if number < len(gaps) else 0)
            while len(content) < end:
                content += self._words[word(number)]
            del content[end:]
        return content, len(content)


class TextMeter:
    """Prompts as text. ``count`` is the server's number of tokens for a whole prompt, template included."""

    def __init__(self, count: Callable[[str], int], style: Style) -> None:
        self._count = count
        self._known: dict[str, int] = {}
        self._base = self._tokens(_BEFORE)
        found: list[tuple[int, tuple[str, ...]]] = []
        for group in style.filler:
            costs = self._word_costs(group)
            for cost in sorted(set(costs.values())):
                alike = tuple(word for word in group if costs[word] == cost)
                found += [(cost, alike)] if len(alike) >= _LEAST_WORDS and cost > 0 else []
            if any(cost == 1 for cost, _ in found):
                break
        if not found:
            raise NotCheckableError(
                "no filler words of a known number of tokens", hint="Give words of the model's vocabulary with --style."
            )
        self._cost, self.filler = min(found, key=lambda one: one[0])

    def _word_costs(self, words: tuple[str, ...]) -> dict[str, int]:
        """Tokens of each word, counted together as long as all are single ones."""
        total = self._tokens(" ".join((_BEFORE, *words))) - self._base
        if total == len(words):
            return dict.fromkeys(words, 1)
        if len(words) == 1:
            return {words[0]: total}
        half = len(words) // 2
        return self._word_costs(words[:half]) | self._word_costs(words[half:])

    def _tokens(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = self._count(text)
        return self._known[text]

    def costs(self, parts: Sequence[str]) -> list[int]:
        """Tokens of each part, shared out by letters; only the sum is exact."""
        total, letters = self._tokens("".join(parts)), sum(map(len, parts))
        costs = [total * len(part) // letters for part in parts]
        costs[-1] += total - sum(costs)
        return costs

    def assemble(
        self, parts: Sequence[str], gaps: Sequence[int], word: Callable[[int], str]
    ) -> tuple[str | list[int], int]:
        """Text; up to one word's tokens short where no filler word is a single token."""
        pieces, words, wanted = [], 0, 0
        for number, part in enumerate(parts):
            pieces.append(part)
            wanted += gaps[number] if number < len(gaps) else 0
            more = wanted // self._cost - words
            pieces += [f" {word(number)}" for _ in range(more)]
            words += more
        return "".join(pieces), self._tokens("".join(parts)) + words * self._cost


def _mean_length(words: dict[str, list[int]]) -> float:
    return sum(map(len, words.values())) / len(words)
