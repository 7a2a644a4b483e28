"""The independent judge of a case: the float64 reference on its rows, read from the bytes that the caches hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..reference import select as reference_select
from ..reference.write import decode_rows, encode_row, field_bytes
from ..testing.compare import check_attention, check_selection
from ..testing.inputs import slots_for
from .case import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cache import CacheView
    from ..testing.compare import Difference
    from .case import Case, Run

_KEYS = 2048
"""Keys scored together: small enough that a row's products stay in a core's cache."""


def judge_writes(case: Case, positions: Sequence[int]) -> dict[str, str]:
    """Compare the cache rows at some positions with the reference's encoding, byte for byte.

    Returns:
        For each cache, where it differs first; empty where it does not.
    """
    inputs, positions = case.inputs, list(positions)
    wanted = {"index cache": (case.index, inputs.index_k[positions])}
    for name, view in case.latents.items():
        wanted[f"latent cache {name}"] = (view, torch.cat((inputs.kv_c[positions], inputs.k_pe[positions]), -1))
    return {name: _first_wrong_row(case, view, positions, rows.cpu()) for name, (view, rows) in wanted.items()}


def _first_wrong_row(case: Case, view: CacheView, positions: Sequence[int], rows: torch.Tensor) -> str:
    storage = torch.empty(0, dtype=torch.uint8, device=case.device).set_(view.storage.untyped_storage())
    for position, row in zip(positions, rows, strict=True):
        slot = int(slots_for(case.table[0].cpu(), BLOCK_SIZE, position, position + 1))
        for name, coded in encode_row(row, view.format).items():
            field, _, _ = view.format.place(name, BLOCK_SIZE)
            first, count = field_bytes(view, slot, field)
            stored = bytes(storage[first : first + count].tolist())
            if stored != coded:
                byte = next(at for at in range(count) if stored[at] != coded[at])
                return f"token {position}: byte {byte} of field {name} is {stored[byte]}, wanted {coded[byte]}"
    return ""


class Oracle:
    """Judges records of select and attend, on the caches as the last run left them. Keys are decoded once."""

    def __init__(self, case: Case, *, exact: bool) -> None:
        self._case, self._exact = case, exact
        self._slots = slots_for(case.table[0].cpu(), BLOCK_SIZE, 0, case.total)
        decoded = [decode_rows(case.index, tile.tolist()) for tile in self._slots.split(_KEYS)]
        self._keys, self._scale = (torch.cat(parts) for parts in zip(*decoded, strict=True))

    def judge(self, runs: Sequence[Run]) -> dict[str, dict[str, str]]:
        """For each stage of select and attend, and each run by plan name, the first difference; no entry where none.

        A record that several runs share is judged once.
        """
        stages = [stage for stage, verb in self._case.stages.items() if verb != "write"]
        found: dict[str, dict[str, str]] = {stage: {} for stage in stages}
        referenced = frozenset(self._case.rows.reference)
        for number, position in enumerate(self._case.rows.query):
            if position not in referenced:
                continue
            scores = self._scores(number, position)
            for stage in stages:
                verdicts: dict[bytes, Difference | None] = {}
                for run in runs:
                    record = run.stages[stage].digest(position) + run.stages["indices"].digest(position)
                    if record not in verdicts:
                        verdicts[record] = self._verdict(stage, number, position, run, scores)
                    verdict = verdicts[record]
                    if verdict is not None:
                        found[stage].setdefault(run.plan.name, f"{verdict} ({run.plan.locate(position)})")
        return found

    def _scores(self, number: int, position: int) -> torch.Tensor:
        """Reference scores ``[position + 1] f64`` of one query row."""
        index_q, weights = self._query(number)
        visible = self._keys[: position + 1].split(_KEYS), self._scale[: position + 1].split(_KEYS)
        return torch.cat([reference_select.scores(index_q, weights, *tile) for tile in zip(*visible, strict=True)])

    def _query(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._case.inputs
        return inputs.index_q[number].cpu(), inputs.index_weights[number].cpu()

    def _verdict(self, stage: str, number: int, position: int, run: Run, scores: torch.Tensor) -> Difference | None:
        (indices,) = run.stages["indices"].kept[position]
        units = self._case.device.type != "cpu"
        if stage == "indices":
            keys = self._keys[: position + 1], self._scale[: position + 1]
            query = self._query(number)
            return check_selection(
                position, indices, *query, *keys, exact=self._exact, scores=scores, matrix_units=units
            )
        out, lse = run.stages[stage].kept[position]
        view = self._case.latents[stage.removeprefix("output ")]
        chosen = indices[(indices >= 0) & (indices < self._case.total)].long()
        latent, _ = decode_rows(view, self._slots[chosen].tolist())
        q = self._case.inputs.q[number].cpu()
        return check_attention(position, out, lse, q, latent, self._case.dims.softmax_scale, matrix_units=units)
