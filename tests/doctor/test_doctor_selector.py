from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.doctor.selector import read

CONFIG = "AttentionSelectorConfig(head_size=576, dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_mla=True, use_sparse=True)"
DENSE = "FLASH_ATTN_MLA: [sparse not supported, compute capability not supported, FlashAttention MLA not supported on this device], TRITON_MLA: [sparse not supported]"


@pytest.mark.parametrize(
    ("sparse", "nearest", "blocking", "adjustable"),
    [
        (
            "FLASHMLA_SPARSE: [compute capability not supported]",
            "FLASHMLA_SPARSE",
            ("compute capability not supported",),
            False,
        ),
        ("FLASHMLA_SPARSE: [dtype not supported]", "FLASHMLA_SPARSE", ("dtype not supported",), True),
        (
            "FLASHMLA_SPARSE: [dtype not supported, compute capability not supported], OTHER_SPARSE: [kv_cache_dtype not supported, block_size not supported]",
            "OTHER_SPARSE",
            ("kv_cache_dtype not supported", "block_size not supported"),
            True,
        ),
        (
            "FLASHMLA_SPARSE: [dtype not supported, compute capability not supported]",
            "FLASHMLA_SPARSE",
            ("compute capability not supported",),
            False,
        ),
        (
            "X_SPARSE: [X requires FlashInfer (a, b), see [1], and more]",
            "X_SPARSE",
            ("X requires FlashInfer (a, b)", "see [1]", "and more"),
            False,
        ),
        ("X_SPARSE: [ImportError: no module named 'x']", "X_SPARSE", ("ImportError: no module named 'x",), False),
    ],
)
def test_blocking_reason(sparse, nearest, blocking, adjustable):
    found = read(CONFIG, "{" + DENSE + ", " + sparse + "}")
    assert found.nearest == nearest
    assert found.adjustable is adjustable
    assert len(found.candidates) >= 3
    assert sum(candidate.dense for candidate in found.candidates) == 2
    if sparse.startswith("X_SPARSE: [X"):
        assert found.blocking == ("X requires FlashInfer (a, b)",)
    else:
        assert found.blocking == blocking


def test_same_answer_without_whitespace():
    reasons = "{" + DENSE + ", FLASHMLA_SPARSE: [kv_cache_dtype not supported]}"
    assert read("".join(CONFIG.split()), "".join(reasons.split())).blocking == read(CONFIG, reasons).blocking


def test_cut_message():
    found = read(CONFIG[:40], "{" + DENSE + ", FLASHMLA_SPARSE: [compute capability not supp")
    assert found.nearest == "FLASHMLA_SPARSE"
    assert found.settings == {"head_size": "576"}


def test_no_sparse_backend_at_all():
    found = read(CONFIG, "{" + DENSE + "}")
    assert (found.nearest, found.blocking, found.adjustable) == ("", (), False)


@given(st.text(alphabet="ABC_: [],(){}=' abc\n", max_size=300), st.text(alphabet="abc_=1,' ", max_size=60))
def test_any_text(reasons, config):
    read(config, reasons)
