"""THE ordered table: which backends exist, what each needs, in the order in which ``auto`` tries them."""

from __future__ import annotations

from ..problem import Stage
from ..requirements import Requires
from .base import Row
from .eager.scratch import attend_buffers, no_buffers, select_buffers, strict

_EAGER = "sparse_mla.backends.eager"

TABLE: tuple[Row, ...] = (
    Row(
        stage=Stage.WRITE,
        name="eager",
        path=f"{_EAGER}.write:Write",
        requires=Requires(),
        scratch=no_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
    Row(
        stage=Stage.SELECT,
        name="eager",
        path=f"{_EAGER}.select:Select",
        requires=Requires(),
        scratch=select_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
    Row(
        stage=Stage.ATTEND,
        name="eager",
        path=f"{_EAGER}.attend:Attend",
        requires=Requires(),
        scratch=attend_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
)
