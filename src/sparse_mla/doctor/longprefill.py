"""The chain of long prefills on ROCm, where the only sparse backend of vLLM has returned fluent nonsense from some prompt
length on: what is served by what, where chunking begins, which known causes this very source has, and the ways out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine_source.audit import ABSENT, FAULTY, WRONG_OUTPUT
from .facts import DEFAULT_LOGITS_MB
from .knowledge import Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine_source.audit import Probe
    from .candidates import Offers

BACKEND = "ROCM_AITER_MLA_SPARSE"
ASSUMED_CHUNK = 8192  # vLLM's usual max_num_batched_tokens on data-centre GPUs
_SCORE_BYTES = 4
# The first release read in which no probe of the ROCm path finds wrong output or a crash: 0.26 to 0.28 have the cached plan
# fixed and other faults in its place.
_SOUND_SINCE = "0.32"

# Probe, and what it means for long prompts. The last two cost memory and time.
CAUSES: Mapping[str, str] = {
    **WRONG_OUTPUT,
    "scratch-reserved": "prefill scratch is not reserved: memory given to the KV cache may be taken",
    "gather-skip": "keys are gathered again for every sub-chunk: time lost, not wrong by itself",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPrefill:
    """One prompt length followed through the chunking of one configuration.

    Attributes:
        only_candidate: the engine has no other sparse backend for this device; None when the source was not read.
        chunk_tokens: query tokens of one prefill chunk (max_num_batched_tokens).
        chunk_assumed: nobody stated it.
        max_scores: fp32 scores that the logits budget holds.
        subchunk_from: context from which a full chunk is cut along its queries.
        third_chunk_from: prompt tokens from which a third chunk exists.
        prompt_tokens: the prompt that is followed; None when neither it nor max_model_len is known.
        num_chunks, num_subchunks: of that prompt; sub-chunks of its last full-width chunk.
        causes: probe id -> faulty, sound, absent or "not read".
        safe_tokens: longest prompt that none of the causes found here reaches; 0 when there is none, None when
            nothing was found.
        dense_possible: whether the config lets the engine run dense attention; None when no config was given.
    """

    arch: str
    version: str
    aiter: str
    only_candidate: bool | None
    chunk_tokens: int
    chunk_assumed: bool
    logits_mb: int
    max_scores: int
    subchunk_from: int
    third_chunk_from: int
    prompt_tokens: int | None
    num_chunks: int | None
    num_subchunks: int | None
    causes: Mapping[str, str]
    safe_tokens: int | None
    dense_possible: bool | None

    @property
    def wrong(self) -> tuple[str, ...]:
        """Causes of wrong output that this source has."""
        return tuple(name for name in WRONG_OUTPUT if self.causes.get(name) == FAULTY)

    @property
    def suspect(self) -> bool:
        """Wrong output is on record for sources like this one (vllm#40018), and no cause can be read in it: the indexer of
        that time calls compiled operators.
        """
        return not self.wrong and self.causes.get("scratch-reserved") == FAULTY


def follow(facts: Mapping[str, Any], probes: Mapping[str, Probe] | None, offers: Offers | None) -> LongPrefill | None:
    """The chain for these facts; None unless vLLM serves a DSA model on an AMD GPU."""
    if facts.get("vendor") != "amd" or facts.get("dsa") is False or facts.get("engine") not in {"vllm", None}:
        return None
    chunk = facts.get("max_num_batched_tokens") or ASSUMED_CHUNK
    budget = facts.get("logits_mb") or DEFAULT_LOGITS_MB
    scores = budget * (1 << 20) // _SCORE_BYTES
    prompt = facts.get("prompt_tokens") or facts.get("max_model_len")
    causes = {name: probes[name].status if probes and name in probes else "not read" for name in CAUSES}
    if causes["cache-layout"] == FAULTY and (facts.get("block_size") or 1) > 1:
        causes["cache-layout"] = ABSENT  # the fixed layout is right for every other block size
    third = 2 * chunk + 1
    return LongPrefill(
        arch=str(facts.get("arch") or "AMD GPU"),
        version=str(facts.get("version:vllm") or ""),
        aiter=str(facts.get("version:aiter") or ""),
        only_candidate=None if offers is None else offers.usable == (BACKEND,),
        chunk_tokens=chunk,
        chunk_assumed=not facts.get("max_num_batched_tokens"),
        logits_mb=budget,
        max_scores=scores,
        subchunk_from=scores // chunk + 1,
        third_chunk_from=third,
        prompt_tokens=prompt,
        num_chunks=-(-prompt // chunk) if prompt else None,
        num_subchunks=-(-min(chunk, prompt) * prompt // scores) if prompt else None,
        causes=causes,
        safe_tokens=_safe(causes, str(facts.get("arch")), scores // chunk + 1, third),
        dense_possible=_dense_possible(facts),
    )


def _safe(causes: Mapping[str, str], arch: str, subchunk: int, third: int) -> int | None:
    if causes["cache-layout"] == FAULTY:
        return 0  # keys are misplaced at every length
    if causes["plan-key"] == FAULTY:
        return third - 1
    if causes["scratch-reserved"] != FAULTY or causes["block-offset-width"] == FAULTY:
        return None
    # On record: right up to one chunk without sub-chunks on gfx950, wrong at every length tried on gfx942.
    return 0 if arch == "gfx942" else min(subchunk, third) - 1


def _dense_possible(facts: Mapping[str, Any]) -> bool | None:
    """VLLM runs dense only where the config has no index_topk; GLM's config class always fills it in."""
    model_type = facts.get("model_type")
    return None if not model_type else model_type != "glm_moe_dsa"


def steps(chain: LongPrefill) -> list[str]:
    """The chain as sentences, in order."""
    only = {True: "the only candidate", False: "not the only candidate", None: "candidates not read"}[
        chain.only_candidate
    ]
    assumed = " (assumed)" if chain.chunk_assumed else ""
    lines = [
        f"{chain.arch}, vLLM {chain.version or 'of unknown version'}, aiter {chain.aiter or 'not found'}: {BACKEND} is {only}",
        f"chunks of {chain.chunk_tokens:,} tokens{assumed}; {chain.logits_mb} MiB of fp32 scores hold {chain.max_scores:,}",
        f"a full chunk is cut along its queries from a context of {chain.subchunk_from:,} tokens on",
        f"a third chunk exists from {chain.third_chunk_from:,} prompt tokens on",
    ]
    if chain.prompt_tokens:
        lines.append(
            f"a prompt of {chain.prompt_tokens:,} tokens: {chain.num_chunks} chunks, the last full one in {chain.num_subchunks} parts"
        )
    lines += [
        f"{name}: {chain.causes[name]}" + (f": {text}" if chain.causes[name] == FAULTY else "")
        for name, text in CAUSES.items()
    ]
    if chain.suspect:
        lines.append(
            "wrong output is on record for this code (vllm-project/vllm#40018); its cause cannot be read in it"
        )
    return lines


def remedies(chain: LongPrefill) -> tuple[Remedy, ...]:
    """The ways out, in order; none unless this source has a cause of wrong output or is suspect."""
    if not (chain.wrong or chain.suspect):
        return ()
    ways = [
        Remedy(
            do="Fix: upgrade to a version in which none of these causes was found.",
            command=f"pip install -U 'vllm>={_SOUND_SINCE}'",
        ),
        Remedy(do="Fix: let the portable backend serve.", command="SPARSE_MLA_VLLM=always vllm serve MODEL"),
    ]
    if chain.safe_tokens:
        limit = chain.safe_tokens
        flags = ("--max-num-batched-tokens", "--max-model-len")
        command = f"vllm serve MODEL {flags[0]} {chain.chunk_tokens} {flags[1]} {limit}"
        how = "reported, not proved" if chain.suspect else "two chunks"
        ways.append(Remedy(do=f"Work-around: at most {limit:,} tokens ({how}).", command=command, flags=flags))
    return (*ways, _dense(chain))


def _dense(chain: LongPrefill) -> Remedy:
    if chain.dense_possible is False:
        why = "this model's config class fills in index_topk, so deleting the key changes nothing"
        return Remedy(do=f"Dense attention is no work-around here: {why}.", approximate=True)
    allowed = "this model's config allows it" if chain.dense_possible else "for a deepseek_v32 model only"
    copy = "a copy of the checkpoint without index_* keys and indexer weights"
    return Remedy(
        do=f"Work-around, right only up to index_topk tokens: dense attention from {copy} ({allowed}).",
        command="vllm serve COPY",
        approximate=True,
    )
