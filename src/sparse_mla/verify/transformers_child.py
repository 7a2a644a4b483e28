"""The child process with Transformers: ``python -m sparse_mla.verify.transformers_child FOLDER``. See ``engine``.

The same weights in fp32, with the selection of every layer judged: by Transformers' own scores with a stable top-k, or by
the float64 reference on the bytes that the engine's cache held. A row whose k-th and next score lie within rounding of
each other has no one answer; there, and only there, the engine's choice stands.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..testing.compare import check_selection
from ..testing.faults import patched
from .children import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

_SCORE_TOLERANCE = 1e-5
"""Two fp32 implementations of a layer differ by about 1e-6 of the largest score."""


class _Selected(NamedTuple):
    """What ``Tensor.topk`` returns, as far as it is used."""

    values: torch.Tensor
    indices: torch.Tensor


class Judge:
    """Answers for the indexer of one layer, and counts what it finds.

    Attributes:
        wrong: the first row whose selection differs beyond rounding; empty if there is none.
        near_ties: rows where two scores around the k-th lie within rounding and the engine took the other one.
    """

    def __init__(self, layer: int, engine: dict[str, torch.Tensor], *, by_reference: bool) -> None:
        self._layer, self._engine, self._by_reference = layer, engine, by_reference
        self.wrong, self.near_ties = "", 0

    def topk(self, scores: torch.Tensor, k: int) -> _Selected:
        """Stands in for ``scores.topk(k, dim=-1)``, ``scores [1, S, S] f32``; a key that is not visible has the lowest."""
        ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
        values, chosen = ordered.values[..., :k], ordered.indices[..., :k]
        theirs = self._engine["indices"].long()
        for row in range(scores.shape[1]):
            seen = row + 1
            mine = chosen[0, row][chosen[0, row] < seen].sort().values
            if self._by_reference:
                self._judge_by_reference(row, theirs[row], seen)
            elif not torch.equal(mine, theirs[row][theirs[row] >= 0]):
                self._judge_by_scores(row, scores[0, row, :seen], mine, theirs[row])
        return _Selected(values, theirs.clamp(min=0)[None, :, :k])

    def _judge_by_reference(self, row: int, theirs: torch.Tensor, seen: int) -> None:
        asked = self._engine
        keys, scale = asked["keys"][:seen], asked["scale"][:seen]
        difference = check_selection(row, theirs, asked["index_q"][row], asked["index_weights"][row], keys, scale)
        if difference is not None and not self.wrong:
            self.wrong = f"layer {self._layer}: {difference}"

    def _judge_by_scores(self, row: int, scores: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        other = theirs[theirs >= 0]
        swapped = [position for position in {*mine.tolist()} ^ {*other.tolist()} if position < scores.numel()]
        slack = _SCORE_TOLERANCE * float(scores.abs().max())
        near = bool(((scores[swapped] - scores[mine].min()).abs() <= slack).all())
        if near and other.numel() == mine.numel() and (not other.numel() or int(other.max()) < scores.numel()):
            self.near_ties += 1
        elif not self.wrong:
            self.wrong = f"layer {self._layer}: row {row}: positions {swapped[:4]} are selected by one of the two only"


@contextmanager
def _judged(indexer: Any, judge: Judge) -> Iterator[None]:
    """Let ``judge`` stand in for the top-k inside one indexer's forward."""
    native = indexer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with patched(torch.Tensor, "topk", lambda scores, k, **_: judge.topk(scores, k)):
            return native(*args, **kwargs)

    with patched(indexer, "forward", forward):
        yield


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of the prompt's tokens from the second on, and what the judges of its layers found."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="eager").eval()
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    recorded, judges = load_file(job["record"]), []
    with ExitStack() as stack, torch.no_grad():
        for layer, indexer in enumerate(indexers):
            prefix = f"{layer}."
            engine = {name.removeprefix(prefix): rows for name, rows in recorded.items() if name.startswith(prefix)}
            judges.append(Judge(layer, engine, by_reference=job["by_reference"]))
            stack.enter_context(_judged(indexer, judges[-1]))
        ids = torch.tensor([job["ids"]])
        logprobs = model(ids, use_cache=False).logits[0].log_softmax(-1)
    chosen = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return {
        "logprobs": chosen.tolist(),
        "next_token": int(logprobs[-1].argmax()),
        "layers": len(indexers),
        "near_ties": sum(judge.near_ties for judge in judges),
        "wrong": next((judge.wrong for judge in judges if judge.wrong), ""),
    }


if __name__ == "__main__":
    serve(run, Path(sys.argv[1]))
