"""An engine's scheduler at operator level: any traffic on a shared pool of blocks must give each prompt's one-shot bits.

Two layers lie interleaved in one allocation. Requests come and go; their tokens arrive in chunks, extends and decodes;
speculative tokens are written, read, rejected and overwritten; requests lose their blocks and start again; blocks that
nobody owns are poisoned. What a script of actions does depends on nothing but the script.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from .inputs import Prompt
from .lane import Asked, Lane, Layer, Rows, Span, demand_empty, demand_same, layers_in_one, one_shot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .candidates import Candidate
    from .geometries import Geometry

LENGTHS = (1, 5, 17, 33, 40, 64, 70, 90)
"""Lengths of the prompts that traffic is made of; few, so that each is computed in one shot only once."""
SLOTS = 4
_LAYERS = 2
_MAX_LEN = max(LENGTHS)


class Action(NamedTuple):
    """What one slot does in a step.

    Attributes:
        take: new tokens that are scheduled; 0 puts an empty request into the batch.
        drafts: speculative tokens behind them; all of them are wrong and are overwritten later.
        preempt: the request loses its blocks first and starts again from its first token.
    """

    slot: int
    take: int
    drafts: int = 0
    preempt: bool = False


class Step(NamedTuple):
    """One call: the actions in batch order, padding rows behind them, and the byte that poisons scratch and free blocks."""

    actions: tuple[Action, ...]
    padding: int = 0
    poison: int = 0xFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """``arrivals`` numbers prompts; each slot takes the next one when it is free."""

    block_size: int
    num_blocks: int
    arrivals: tuple[int, ...]
    steps: tuple[Step, ...]


class _Piece(NamedTuple):
    """A request's part of a call: ``good`` tokens of its prompt, then drafts up to ``stop``."""

    slot: int
    start: int
    good: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept(Prompt):
    """A short prompt whose rows are made once: scripts ask for them again and again."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return _all_rows(self, name)[start:stop]


@lru_cache(maxsize=1024)
def _all_rows(prompt: _Kept, name: str) -> torch.Tensor:
    return Prompt.rows(prompt, name, 0, _MAX_LEN)


def prompt_of(geometry: Geometry, number: int, layer: int, *, draft: bool = False) -> Prompt:
    """Prompt ``number`` as a layer sees it, or what a bad draft model would put in its place."""
    seed = (number * _LAYERS + layer) * 2 + draft
    kind = ("normal", "tied")[number % 2]
    length = LENGTHS[number % len(LENGTHS)]
    return _Kept(dims=geometry.dims, length=length, seed=seed, kind=kind, dtype=geometry.dtype)


@dataclass(kw_only=True)
class Scheduler:
    """Plays a script on one lane and compares every answer."""

    candidate: Candidate
    geometry: Geometry
    script: Script
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        size = self.script.block_size
        problem = self.geometry.blocks_of(size).problem(
            max_num_tokens=SLOTS * _MAX_LEN + 16, max_num_requests=SLOTS + 1, max_model_len=_MAX_LEN
        )
        self.lane = Lane(self.candidate, problem)
        self.table = torch.full((SLOTS, -(-_MAX_LEN // size)), -1, dtype=torch.int32, device=self.candidate.where)
        least = -(-_MAX_LEN // size)
        self.free = list(range(max(self.script.num_blocks, least)))
        self.layers = layers_in_one(
            self.geometry.blocks_of(size), [()] * _LAYERS, self.table, len(self.free), seed=self.script.block_size
        )
        self.arrivals = list(self.script.arrivals)
        self.prompt: list[int | None] = [None] * SLOTS
        self.done = [0] * SLOTS
        self.pieces: dict[int, _Piece] = {}

    def play(self) -> Counter[str]:
        """Run the script, then finish what is still running."""
        for step in self.script.steps:
            self._step(step)
        while self.arrivals or any(prompt is not None for prompt in self.prompt):
            slot = next((slot for slot in range(SLOTS) if self.prompt[slot] is not None), 0)
            self._step(Step((Action(slot, 64),)))
        return self.counts

    def _step(self, step: Step) -> None:
        self.lane.poison = step.poison
        self.pieces.clear()
        for action in step.actions:
            self._schedule(action, step.poison)
        pieces = list(self.pieces.values())
        for number in range(_LAYERS):
            self._write(number, pieces, step.padding)
            self._read(number, pieces, step.padding)
        self.pieces.clear()
        for piece in pieces:
            self.done[piece.slot] = piece.good
            if piece.good == self._length(piece.slot):
                self._release(piece.slot, step.poison)
                self.prompt[piece.slot] = None
                self.counts["requests"] += 1
        self.counts["steps"] += 1

    def _schedule(self, action: Action, poison: int) -> None:
        slot = action.slot
        if self.prompt[slot] is None:
            if not self.arrivals:
                return
            self.prompt[slot], self.done[slot] = self.arrivals.pop(0), 0
        elif action.preempt:
            self._release(slot, poison)
            self.counts["preempted"] += 1
        length, start = self._length(slot), self.done[slot]
        good = min(start + action.take, length)
        stop = min(good + action.drafts, _MAX_LEN) if action.take else good
        if self._allocate(slot, stop, poison):
            self.pieces[slot] = _Piece(slot, start, good, stop)
            self.counts["rejected"] += stop - good

    def _length(self, slot: int) -> int:
        number = self.prompt[slot]
        return 0 if number is None else LENGTHS[number % len(LENGTHS)]

    def _allocate(self, slot: int, tokens: int, poison: int) -> bool:
        """Blocks for ``tokens`` tokens; when the pool is dry another request gives its own back."""
        wanted = -(-tokens // self.script.block_size)
        for column in range(wanted):
            if int(self.table[slot, column]) >= 0:
                continue
            if not self.free:
                victims = [other for other in range(SLOTS) if other != slot and int(self.table[other, 0]) >= 0]
                if not victims:
                    return False
                self._release(victims[-1], poison)
                self.counts["preempted"] += 1
            self.table[slot, column] = self.free.pop(len(self.free) // 2)
        return True

    def _release(self, slot: int, poison: int) -> None:
        """The request's blocks go back, poisoned in every layer; it leaves this call and is at its start again."""
        self.pieces.pop(slot, None)
        for block in self.table[slot][self.table[slot] >= 0].tolist():
            self.free.append(block)
            for layer in self.layers:
                for view in (layer.latent, layer.index):
                    start = view.offset_bytes + block * view.block_stride_bytes
                    view.storage[start : start + view.block_size * view.format.row_bytes] = poison
        self.table[slot] = -1
        self.done[slot] = 0

    def _layer(self, number: int, *, draft: bool) -> Layer:
        prompts = [prompt_of(self.geometry, prompt or 0, number, draft=draft) for prompt in self.prompt]
        return replace(self.layers[number], prompts=tuple(prompts))

    def _write(self, number: int, pieces: Sequence[_Piece], padding: int) -> None:
        self.lane.write(self._layer(number, draft=False), [Span(p.slot, p.start, p.good) for p in pieces], padding)
        self.lane.write(
            self._layer(number, draft=True), [Span(p.slot, p.good, p.stop) for p in pieces if p.stop > p.good]
        )

    def _read(self, number: int, pieces: Sequence[_Piece], padding: int) -> None:
        true, draft = self._layer(number, draft=False), self._layer(number, draft=True)
        asked = [true.asked([])]
        for piece in pieces:
            asked += [true.asked([Span(piece.slot, piece.start, piece.good)])]
            asked += [draft.asked([Span(piece.slot, piece.good, piece.stop)])]
        together = Asked(*(torch.cat(fields) for fields in zip(*asked, strict=True))).padded(padding)
        batch = true.batch([Span(piece.slot, piece.start, piece.stop) for piece in pieces], padding)
        rows, start = self.lane.ask(true, batch, together), 0
        for piece in pieces:
            self._compare(number, piece, rows.at(slice(start, start + piece.good - piece.start)))
            start += piece.stop - piece.start
        demand_empty(rows.at(slice(start, None)), "padding rows")

    def _compare(self, number: int, piece: _Piece, rows: Rows) -> None:
        prompt = prompt_of(self.geometry, self.prompt[piece.slot] or 0, number)
        alone = one_shot(self.candidate, self.geometry, prompt)
        where = f"layer {number} prompt {self.prompt[piece.slot]} tokens {piece.start} to {piece.good}"
        demand_same(rows, alone.at(slice(piece.start, piece.good)), where)
        self.counts["tokens"] += piece.good - piece.start
