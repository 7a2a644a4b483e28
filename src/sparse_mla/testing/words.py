"""The 1,024 tokens of the retrieval model and its tokenizer, written down: bytes, syllables and words, merged in order.

Any text survives, for every byte is a token; a word of the list, with the space before it, is one token.
"""

from __future__ import annotations

from typing import Any

END, PAD, START = "<|end|>", "<|pad|>", "<|start|>"
STOP = "."
ASK = ":"
_SPACE = "Ġ"  # the letter that byte-level tokenizers write for a space
_VOCABULARY_SIZE = 1024
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvzj" for vowel in "aeiou"]
_WORD_STRIDE = 1009  # prime to the number of pairs, so that words do not repeat


def _byte_letters() -> list[str]:
    """The letter of each byte: itself where it is printable and no space, else the next from 256 on (as GPT-2 does)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _word_parts(count: int) -> list[tuple[str, str]]:
    pairs = len(_SYLLABLES) ** 2
    chosen = [divmod(number * _WORD_STRIDE % pairs, len(_SYLLABLES)) for number in range(1, count + 1)]
    return [(_SPACE + _SYLLABLES[first], _SYLLABLES[second]) for first, second in chosen]


_SPECIAL = [END, PAD, START]
_BASE = [*_SPECIAL, *_byte_letters()]
_PARTS = _word_parts(_VOCABULARY_SIZE - len(_BASE) - 2 * len(_SYLLABLES))
_MERGES = [*((s[0], s[1]) for s in _SYLLABLES), *((_SPACE, s) for s in _SYLLABLES), *_PARTS]
VOCABULARY = {token: number for number, token in enumerate([*_BASE, *(left + right for left, right in _MERGES)])}
WORDS = [f" {(left + right).removeprefix(_SPACE)}" for left, right in _PARTS]
"""615 words of two syllables, each with the space before it."""


def word_id(text: str) -> int:
    """Id of a word of ``WORDS``, of a byte's letter or of a special token."""
    return VOCABULARY[text.replace(" ", _SPACE)]


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """Content of ``tokenizer.json`` and ``tokenizer_config.json``. The chat template adds nothing after the last
    message, so that the model goes on where the question stops.
    """
    special = [
        {"id": VOCABULARY[token], "content": token, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for token in _SPECIAL
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": VOCABULARY, "merges": [list(pair) for pair in _MERGES]}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    template = "{% for message in messages %}{{ message['content'] }}{{ '' if loop.last else '\\n' }}{% endfor %}"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 1 << 17,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}
