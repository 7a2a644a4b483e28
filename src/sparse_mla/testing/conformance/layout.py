"""C5: cache bytes are public: every write equals the byte table, byte for byte, and touches nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...cache import CacheFormat, CacheView, Field, fp8_ds_mla, index_fp8, plain
from ...reference.write import decode_rows, encode_row, field_bytes, fp8_values
from ...shapes import DTYPE_NAMES
from ..compare import Difference, check_attention, check_selection, demand, require
from ..geometries import FNUZ, FP8, ODD, PLAIN, Geometry
from ..inputs import interleaved
from ..lane import Asked, Layer, Span, new_layer, whole
from ..scores import asking
from .case import variants
from .rows import lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate
    from ..lane import Lane

_FORMATS = (
    replace(PLAIN, name="bf16"),
    replace(PLAIN, name="f16", dtype="f16", latent=plain(576, "f16"), index=plain(64, "f16")),
    replace(PLAIN, name="f32", dtype="f32", latent=plain(576, "f32"), index=plain(64, "f32")),
    replace(FP8, name="fp8"),
    replace(FP8, name="fp8-other-rules", latent=fp8_ds_mla(power_of_two=True), index=index_fp8(64, power_of_two=False)),
    replace(FNUZ, name="fnuz"),
    replace(
        FNUZ,
        name="fnuz-other-rules",
        latent=fp8_ds_mla(encoding="fp8fnuz", power_of_two=True),
        index=index_fp8(64, encoding="fp8fnuz", power_of_two=False),
    ),
    replace(ODD, name="odd"),
)


def telling_rows(width: int, cache_format: CacheFormat) -> torch.Tensor:
    """Rows that tell rules apart ``[N, width] f32``: zeros, subnormals, rounding ties, saturation, very unequal ranges."""
    source = torch.Generator().manual_seed(width)
    normal = torch.randn(5, width, generator=source)
    largest = cache_format.rule.fp8_max if cache_format.rule else 448.0
    codes = [
        value for value in fp8_values(cache_format.encoding if cache_format.rule else "fp8") if abs(value) <= largest
    ]
    grid = torch.tensor(sorted(codes))
    ties = (grid[1:] + grid[:-1]) / 2
    ties = ties.repeat(-(-width // ties.numel()))[:width].clone()
    ties[::32] = largest  # the scale is 1 in every group
    unequal = normal[0].clone()
    unequal[width // 2 :] *= 100.0
    single = torch.zeros(width)
    single[width - 1] = -3.5
    below_floor = normal[3] * 1e-6
    rows = (
        torch.zeros(width),
        -torch.zeros(width),
        torch.full((width,), 2.0**-133),
        below_floor,
        normal[1] * 1e-3,
        normal[2] * 1e4,
        normal[4],
        ties,
        -ties,
        unequal,
        unequal.flip(0),
        single,
        torch.full((width,), largest * 1.0625),
    )
    return torch.stack(rows)


def _storage(view: CacheView) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=view.storage.device).set_(view.storage.untyped_storage())


def _demand_bytes(view: CacheView, before: torch.Tensor, rows: torch.Tensor, slots: list[int], where: str) -> None:
    """The whole allocation: the rows' bytes as the reference encodes them, every other byte as it was."""
    wanted = before.clone()
    owner: dict[int, str] = {}
    for row, slot in zip(rows, slots, strict=False):
        for name, coded in encode_row(row, view.format).items() if slot >= 0 else ():
            field = next(field for field in view.format.fields if field.name == name)
            start, size = field_bytes(view, slot, field)
            wanted[start : start + size] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
            owner |= dict.fromkeys(range(start, start + size), f"{name} of slot {slot}")
    got = _storage(view).cpu()
    if not torch.equal(got, wanted):
        at = int((got != wanted).nonzero()[0])
        detail = f"byte {at} ({owner.get(at, 'nobody’s')}) is {int(got[at]):#04x}, wanted {int(wanted[at]):#04x}"
        demand(Difference(what="cache", row=at, detail=detail), where)


def written(candidate: Candidate, geometry: Geometry, block_size: int, gap_bytes: int) -> None:
    """Rows of every kind, in slots far apart, beside another cache and foreign memory; negative slots; padding rows."""
    here = replace(geometry, block_size=block_size)
    lane = lane_for(candidate, here)
    for latent in (True, False):
        cache_format = here.latent if latent else here.index
        _, view = interleaved(
            [cache_format, cache_format],
            block_size,
            60 // block_size + 2,
            seed=1,
            gap_bytes=gap_bytes,
            where=lane.where,
        )
        dtype = getattr(torch, DTYPE_NAMES[here.dtype])
        rows = telling_rows(cache_format.width, cache_format).to(dtype)
        order = torch.randperm(view.num_slots, generator=torch.Generator().manual_seed(2))[: rows.shape[0] - 2]
        order[3], order[5] = -1, -77
        before = _storage(view).cpu().clone()
        _write(lane, view, rows, order, latent=latent)
        _demand_bytes(view, before, rows, order.tolist(), f"{here} {cache_format} in blocks of {block_size}")


def _write(lane: Lane, view: CacheView, rows: torch.Tensor, slots: torch.Tensor, *, latent: bool) -> None:
    rows, slots = rows.to(lane.where), slots.to(lane.where)
    lane.workspace.fill(lane.poison)
    if latent:
        rank = lane.operator.plan.problem.dims.kv_lora_rank
        lane.operator.write_latent(rows[:, :rank], rows[:, rank:], view, slots)  # strided, as an engine splits them
    else:
        lane.operator.write_index(rows, view, slots)


def not_a_number(candidate: Candidate, geometry: Geometry) -> None:
    """A NaN makes its own group NaN when read, and no other group or row."""
    lane = lane_for(candidate, geometry)
    for latent in (True, False):
        cache_format = geometry.latent if latent else geometry.index
        rows = torch.randn(3, cache_format.width, generator=torch.Generator().manual_seed(4))
        clean = rows.clone()
        rows[1, 0] = torch.nan
        views = [interleaved([cache_format], 4, 1, seed=3, where=lane.where)[0] for _ in range(2)]
        for view, values in zip(views, (rows, clean), strict=True):
            _write(lane, view, values.to(getattr(torch, DTYPE_NAMES[geometry.dtype])), torch.arange(3), latent=latent)
        (got, scale), (wanted, wanted_scale) = (decode_rows(view, [0, 1, 2]) for view in views)
        group = _group_of(cache_format)
        require((got[1, :group] * scale[1]).isnan().all(), f"{geometry} {cache_format}: a NaN was written as a number")
        got[1, :group], scale[1] = wanted[1, :group], wanted_scale[1]
        same = torch.equal(got, wanted) and torch.equal(scale, wanted_scale)
        require(same, f"{geometry} {cache_format}: a NaN reached another group or row")


def _group_of(cache_format: CacheFormat) -> int:
    """Values that share a scale; 1 where there is none."""
    scales = {field.name: field.count for field in cache_format.fields}.get("scale", cache_format.width)
    return cache_format.fields[0].count // scales


def every_code(candidate: Candidate, geometry: Geometry) -> None:
    """All 256 bytes, read back through attend and through select under scales of any size."""
    lane, prompt = lane_for(candidate, geometry), prompts_of(geometry, "normal", (256,))[0]
    layer = new_layer(geometry, [prompt], where=candidate.where)
    lane.write(layer, whole([prompt]))
    slots = layer.slots(Span(0, 0, 256)).tolist()
    scales = (2.0 ** torch.randint(-20, 12, (256, 4), generator=torch.Generator().manual_seed(6))) * 1.375
    codes = torch.arange(256, dtype=torch.uint8)
    nan = torch.tensor(fp8_values(geometry.latent.encoding)).isnan()
    for position, slot in enumerate(slots):
        row = codes.roll(position).repeat(2)
        _put(layer.latent, slot, "values", torch.where(nan[row.long()], 1, row) if position % 8 else row)
        _put(layer.latent, slot, "scale", (scales[position]).view(torch.uint8))
        key = torch.zeros(geometry.dims.index_head_dim, dtype=torch.uint8)
        key[0] = codes[position]
        _put(layer.index, slot, "values", key)
        _put(layer.index, slot, "scale", scales[position, :1].view(torch.uint8))
    _demand_latents(lane, layer, slots)
    _demand_keys(lane, layer, slots)


def _put(view: CacheView, slot: int, name: str, coded: torch.Tensor) -> None:
    field: Field = next(field for field in view.format.fields if field.name == name)
    start, size = field_bytes(view, slot, field)
    _storage(view)[start : start + size] = coded.to(view.storage.device)


def _demand_latents(lane: Lane, layer: Layer, slots: list[int]) -> None:
    """One index a row: the output is that latent."""
    geometry, span = layer.geometry, Span(0, 0, 256)
    indices = torch.full((256, geometry.dims.index_topk), -1, dtype=torch.int32)
    indices[:, 0] = torch.arange(256)
    asked = layer.asked([span])
    out, lse = lane.attend(layer, layer.batch([span]), asked, indices.to(lane.where))
    latent, _ = decode_rows(layer.latent, slots)
    for row in range(256):
        fault = check_attention(
            row, out[row], lse[row], asked.q[row], latent[row : row + 1], geometry.dims.softmax_scale
        )
        demand(fault, f"{geometry} codes from {row}")


def _demand_keys(lane: Lane, layer: Layer, slots: list[int]) -> None:
    geometry, dims = layer.geometry, layer.geometry.dims
    index_q, weights = asking(256, dims.index_n_heads, dims.index_head_dim, geometry.index.encoding)
    asked = Asked(index_q, weights, torch.zeros(256, dims.num_heads, dims.head_dim))
    indices, _ = lane.select(layer, layer.batch(whole(layer.prompts)), asked)
    keys, scale = decode_rows(layer.index, slots)
    for row in range(256):
        seen = slice(0, row + 1)
        fault = check_selection(row, indices[row], index_q[row], weights[row], keys[seen], scale[seen], exact=True)
        demand(fault, f"{geometry} key codes up to {row}")


CASES = (
    *variants(
        "C5",
        written,
        *((geometry, size, 0) for geometry in _FORMATS for size in (1, 16)),
        *((geometry, size, 64) for geometry in _FORMATS for size in (33,)),
        (_FORMATS[0], 1280, 4),
        (_FORMATS[3], 64, 4),
        (_FORMATS[5], 1280, 656),
    ),
    *variants("C5", not_a_number, *((geometry,) for geometry in _FORMATS)),
    *variants("C5", every_code, (FP8,), (FNUZ,)),
)
