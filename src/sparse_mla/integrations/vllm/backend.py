"""The attention backend that vLLM is told of: names the classes, declares the limits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .impl import SparseMLAImpl
from .layer_seams import attention_bases
from .metadata import SparseMLAMetadataBuilder
from .seams import BACKEND_NAME, LATENT_FORMATS

_BASE: Any = attention_bases().backend


def _always(value: object) -> Any:
    """A class method that answers ``value`` whatever it is asked about."""
    return classmethod(lambda _cls, *_args: value)


class SparseMLABackend(_BASE):
    """Serves latent caches and index caches alike: both need the same metadata."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = list(LATENT_FORMATS)

    get_name = _always(BACKEND_NAME)
    get_impl_cls = _always(SparseMLAImpl)
    get_builder_cls = _always(SparseMLAMetadataBuilder)
    is_mla = is_sparse = _always(True)
    supports_compute_capability = supports_batch_invariance = _always(True)
    supports_kv_connector = supports_pcp = supports_dcp = _always(False)
