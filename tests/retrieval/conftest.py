from __future__ import annotations

import pytest

from sparse_mla.testing.retrieval import write_retrieval_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    write_retrieval_model(folder, index_topk=64)
    return folder
