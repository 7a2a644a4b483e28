"""C8: no silent route: every plan names who runs each stage, and an explicit request never falls back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...backends.table import TABLE
from ...cache import fp8_ds_mla, plain
from ...device import probe
from ...errors import BackendRejectedError, CacheFormatError
from ...plan import make_plan
from ..compare import refusal, require
from ..geometries import FP8, PLAIN, Geometry, plain_caches
from ..lane import new_layer, whole
from .case import variants
from .rows import lane_for, prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...dims import MLADims
    from ...problem import Problem
    from ..candidates import Candidate


def _problem(geometry: Geometry) -> Problem:
    return geometry.problem(max_num_tokens=64, max_num_requests=4, max_model_len=512)


def named(candidate: Candidate, geometry: Geometry) -> None:
    """The plan and its description name the candidate for each stage it serves, the mode and the index_topk."""
    plan = candidate.plan(_problem(geometry))
    said = plan.describe()
    require(said["index_topk"] == geometry.dims.index_topk, f"describe() says index_topk {said['index_topk']}")
    stages = said["stages"]
    require(isinstance(stages, dict) and set(stages) == {"write", "select", "attend"}, "describe() leaves out a stage")
    for row in candidate.own:
        stage = plan.stages[row.stage]
        require(stage.row is row, f"{row.stage} would run on {stage.row.name}, not on {row.name}")
        told = stages[str(row.stage)]  # type: ignore[index]
        require(told["backend"] == row.name, f"describe() says {told['backend']} for {row.stage}")
        require(told["mode"] == "strict", f"{row.stage} is in {told['mode']} mode when strict was asked for")


def never_falls_back(candidate: Candidate, geometry: Geometry) -> None:
    """Asked for by name where it cannot run, it raises with needs and got, though eager stands in the same table."""
    for row in candidate.own:
        nowhere = replace(row, name="asked-for", requires=replace(row.requires, archs=("no-such-device",)))
        others = [replace(other, name="asked-for") for other in candidate.rows if other.stage != row.stage]
        table = (nowhere, *others, *(other for other in TABLE if other.name == "eager"))
        plan = partial(make_plan, _problem(geometry), probe(candidate.where), backend="asked-for", rows=table)
        said = refusal(plan, BackendRejectedError, f"{row.stage} on no such device")
        for part in ("asked-for", "needs no-such-device", f"got {probe(candidate.where).arch}"):
            require(part in said, f"the refusal of {row.stage} does not say {part!r}: {said}")


_LIMITS: dict[str, tuple[str, Callable[[MLADims, Any], MLADims]]] = {
    "max_heads": ("attention heads", lambda dims, limit: replace(dims, num_heads=limit + 1)),
    "max_index_heads": ("index_n_heads", lambda dims, limit: replace(dims, index_n_heads=limit + 1)),
    "max_index_topk": ("index_topk", lambda dims, limit: replace(dims, index_topk=limit + 1)),
    "kv_lora_ranks": ("kv_lora_rank", lambda dims, allowed: replace(dims, kv_lora_rank=max(allowed) + 128)),
    "rope_dims": ("qk_rope_head_dim", lambda dims, allowed: replace(dims, qk_rope_head_dim=max(allowed) + 32)),
    "index_head_dims": ("index_head_dim", lambda dims, allowed: replace(dims, index_head_dim=max(allowed) + 32)),
}
"""A field of Requires, what a refusal calls it, and sizes just beyond it."""


def declared_limits(candidate: Candidate, geometry: Geometry) -> None:
    """Beyond each declared limit the plan is refused, and the refusal names the limit."""
    for row in candidate.own:
        for name, (what, beyond) in _LIMITS.items():
            limit = getattr(row.requires, name)
            if limit:
                outside = plain_caches(f"beyond-{what}", beyond(geometry.dims, limit), geometry.dtype)
                plan = partial(candidate.plan, _problem(outside))
                said = refusal(plan, BackendRejectedError, f"{row.stage} beyond its limit of {what}")
                require(what in said, f"the refusal does not name {what}: {said}")


def foreign_layout(candidate: Candidate, geometry: Geometry) -> None:
    """A view of another layout than the plan's is refused by every verb, before a byte is read or written."""
    lane, prompts = lane_for(candidate, geometry), prompts_of(geometry, "normal", (20,))
    other = fp8_ds_mla() if geometry.latent.rule is None else plain(576, "bf16")
    strange = replace(geometry, latent=other, index=plain(geometry.dims.index_head_dim, "f32"))
    layer = new_layer(strange, prompts, where=candidate.where)
    before = layer.latent.storage.clone(), layer.index.storage.clone()
    batch, asked = (
        layer.batch(whole(prompts)),
        new_layer(geometry, prompts, where=candidate.where).asked(whole(prompts)),
    )
    kv_c, k_pe, index_k = (layer.rows(name, whole(prompts)).to(candidate.where) for name in ("kv_c", "k_pe", "index_k"))
    slots, verbs = layer.slots(whole(prompts)[0]).to(candidate.where), lane.operator
    index_q, weights, q = (field.to(candidate.where) for field in asked)
    indices = index_q.new_zeros((20, geometry.dims.index_topk), dtype=batch.visible_lens.dtype)
    for call in (
        partial(verbs.write_latent, kv_c, k_pe, layer.latent, slots),
        partial(verbs.write_index, index_k, layer.index, slots),
        partial(verbs.select, index_q, weights, layer.index, batch),
        partial(verbs.attend, q, layer.latent, indices, batch, 1.0),
    ):
        refusal(call, CacheFormatError, "a cache of another layout than the plan's")
    untouched = before[0].equal(layer.latent.storage) and before[1].equal(layer.index.storage)
    require(untouched, "a refused write left bytes behind")


CASES = (
    *variants("C8", named, (PLAIN,), (FP8,)),
    *variants("C8", never_falls_back, (PLAIN,)),
    *variants("C8", declared_limits, (PLAIN,)),
    *variants("C8", foreign_layout, (PLAIN,), (FP8,)),
)
