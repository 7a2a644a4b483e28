"""select on score distributions that are hard to cut: time beside the random one, rows checked against a full stable sort.

    python scripts/distributions.py [--device cuda] [--backend triton] [--context 131072] [--rows 256]

Queries and keys are such that the score of a key is exactly its scale in the cache, which so may be anything. Exits with 1 if
a row is wrong, if one distribution takes more than twice the time of the random one, or four times where it was made against
the sampling of the Triton backend. Two that also know the seed of that, which no prompt can, are timed without a bound.
"""

from __future__ import annotations

import argparse
from math import inf

import torch

from sparse_mla.bench.cases import Prepared, Shape
from sparse_mla.bench.timing import median_us
from sparse_mla.device import probe

SEED = 20261130
NAMED, HOSTILE = 2.0, 4.0


def sampled_keys(count: int, stride: int, seed: int) -> torch.Tensor:
    """Positions that the Triton backend samples, one in ``stride``; written without its code."""
    number, low = torch.arange(count // stride), 0xFFFFFFFF
    mixed = number ^ seed
    mixed = ((mixed ^ mixed >> 16) * 0x85EBCA6B) & low
    mixed = ((mixed ^ mixed >> 13) * 0xC2B2AE35) & low
    return number * stride + ((mixed ^ mixed >> 16) & stride - 1)


def made_against_the_sample(uniform: torch.Tensor, stride: int) -> dict[str, tuple[torch.Tensor, float]]:
    """Scores and bounds by name: what is best or worst just where another seed samples, and where the one in use does."""

    def shifted(seed: int, inside: float, outside: float) -> torch.Tensor:
        sampled = sampled_keys(len(uniform), stride, seed)
        return (uniform + outside).index_add(0, sampled, torch.full((len(sampled),), inside - outside))

    return {
        "best where another seed samples": (shifted(SEED + 1, 4.0, 0.0), HOSTILE),
        "worst where another seed samples": (shifted(SEED + 1, -4.0, 4.0), HOSTILE),
        "best at the sampled keys": (shifted(SEED, 4.0, 0.0), inf),
        "worst at the sampled keys": (shifted(SEED, -4.0, 4.0), inf),
    }


def distributions(count: int, stride: int | None) -> dict[str, tuple[torch.Tensor, float]]:
    """Scores ``[count] f32`` by name, and how many times the random one each may cost; ``stride``: keys for each sampled one."""
    generator = torch.Generator().manual_seed(0)
    position, uniform = torch.arange(count), torch.rand(count, generator=generator)
    normal = torch.randn(count, generator=generator)
    recent = torch.exp2((position - count) / 1024)
    spans = ((position // 512) % 37 == 5).float()

    named = {
        "random": normal,
        "all equal": torch.ones(count),
        "zero but 100": torch.where(position % (count // 100) == 7, normal, 0.0),
        "one exponent": 1 + uniform,
        "sinks + recency": recent + 4.0 * (position < 4) + uniform / 64,
        "spans": 2 * spans + uniform,
        "one span": 2.0 * (abs(position - count // 3) < 1500) + uniform,
        "descending": -position.float(),
        "ascending": position.float(),
        "8 levels": torch.floor(uniform * 8),
        "every 32nd": (position % 32 == 0) + uniform / 2,
        "all NaN": torch.full((count,), torch.nan),
        "NaN but 1,000": torch.where(position % (count // 1000) == 3, normal, torch.nan),
        "half NaN": torch.where(uniform < 0.5, normal, torch.nan),
        "inf and -inf": torch.where(uniform < 0.1, torch.inf, torch.where(uniform < 0.2, -torch.inf, normal)),
        "all -inf": torch.full((count,), -torch.inf),
    }
    bounded = {name: (scores, NAMED) for name, scores in named.items()}
    return bounded if stride is None else bounded | made_against_the_sample(uniform, stride)


def expected(scores: torch.Tensor, visible: int, topk: int) -> torch.Tensor:
    """Positions of the best, ascending, then -1: ties to the lower position, NaN never."""
    seen = scores[:visible]
    real = (~seen.isnan()).nonzero().flatten()
    order = seen[real].sort(descending=True, stable=True).indices[:topk]
    best = real[order].sort().values
    return torch.nn.functional.pad(best, (0, topk - len(best)), value=-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--rows", type=int, default=256)
    args = parser.parse_args()
    where = torch.device(args.device)
    shape = Shape(stage="select", heads=32, rows=args.rows, requests=1, context=args.context)
    if args.backend == "triton":
        from sparse_mla.backends.triton import scratch, select

        select.randbits = lambda _: SEED
    case = Prepared(shape, probe(where), where, backend=args.backend, strict=False)
    # 128 products of 1 and 1/128 in each of 32 heads of weight 1/32: every step is exact.
    case.view.field("values").copy_(torch.ones((), device=where))
    scale = case.view.field("scale").squeeze(-1)
    case.query.copy_(torch.full((), 1 / 128, device=where))
    case.weights.fill_(1 / shape.heads)
    table, size = case.batch.block_table[0].long(), case.view.block_size
    position = torch.arange(args.context, device=where)
    bad, base = 0, 0.0
    stride = scratch.sample_stride(case.plan.problem) if args.backend == "triton" else None
    for name, (scores, most) in distributions(args.context, stride).items():
        on_device = scores.to(where)
        scale[table[position // size], position % size] = on_device
        case.call()
        wrong = [
            row
            for row in {0, args.rows // 2, args.rows - 1}
            if not torch.equal(
                case.out[row].long(), expected(on_device, int(case.batch.visible_lens[row]), case.dims.index_topk)
            )
        ]
        took = median_us(case.call, where, graph=where.type == "cuda")
        base = base or took
        verdict = f"WRONG in rows {wrong}" if wrong else "exact" if took <= most * base else "exact, TOO SLOW"
        bad += verdict != "exact"
        print(f"{name:34}{took:10.0f} µs {took / base:6.2f} x  {verdict}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
