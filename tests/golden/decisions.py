"""What is decided for machines that nobody here has: backend, mode, scratch bytes and reasons, a line each.

``python tests/golden/decisions.py`` rewrites the committed answers; a change of them belongs into the commit's message.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparse_mla.cache import fp8_ds_mla
from sparse_mla.device import KNOWN, Device
from sparse_mla.plan import make_plan
from sparse_mla.problem import Stage
from sparse_mla.testing.geometries import DEEPSEEK_TP8, GLM_TP4, GLM_TP4_FP8, ODD, fp8_caches

FILE = Path(__file__).with_name("decisions.txt")
_FNUZ = fp8_caches("glm-5.1-tp4-fnuz", GLM_TP4.dims, "fp8fnuz", block_size=64)
_MIXED = replace(GLM_TP4, name="glm-5.1-tp4-mixed", latent=fp8_ds_mla(encoding="fp8fnuz"))
GEOMETRIES = (GLM_TP4, GLM_TP4_FP8, DEEPSEEK_TP8, _FNUZ, _MIXED, ODD)
CONTEXTS = (8192, 202_752, 1_000_000)
BUDGET = 256 << 20


def problem(geometry, context, *, deterministic=False):
    return geometry.problem(
        max_num_tokens=8192, max_num_requests=64, max_model_len=context, deterministic=deterministic
    )


def decisions():
    """One line for each device, geometry and stage."""
    return [line(arch, geometry, stage) for arch in KNOWN for geometry in GEOMETRIES for stage in Stage]


def line(arch, geometry, stage):
    """Who runs it, in which mode, the scratch bytes at each context, and what each rejected row said."""
    device = Device.named(arch)
    plans = [
        make_plan(problem(geometry, context), device, backend="auto", budget_bytes=BUDGET, assume_installed=True)
        for context in CONTEXTS
    ]
    chosen = plans[0].stages[stage]
    scratch = " ".join(
        f"{context}:{plan.stages[stage].scratch_bytes}" for context, plan in zip(CONTEXTS, plans, strict=True)
    )
    rejected = "; ".join(
        f"not {verdict.row.name} ({', '.join(map(str, verdict.reasons))})"
        for verdict in chosen.resolution.verdicts
        if verdict.reasons
    )
    return f"{arch} {geometry} {stage}: {chosen.row.name} {chosen.mode} {scratch} {rejected}".rstrip()


if __name__ == "__main__":
    FILE.write_text("\n".join(decisions()) + "\n")
