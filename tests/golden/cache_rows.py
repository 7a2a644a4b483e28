"""Bytes of whole cache rows for each format, encoding and write rule, so that a layout can never drift silently.

The rows are made from their numbers alone (see ``row``), the bytes by the reference; ``python tests/golden/cache_rows.py``
rewrites them, which no change but a new format should need: they are what engines have stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sparse_mla.cache import fp8_ds_mla, index_fp8, plain
from sparse_mla.reference.write import encode_row

FILE = Path(__file__).with_name("cache_rows.json")
FORMATS = {
    "plain bf16": plain(144, "bf16"),
    "plain f16": plain(144, "f16"),
    "plain f32": plain(36, "f32"),
} | {
    f"{name} {encoding} {'power of two' if power else 'amax'}": make(encoding, power)
    for encoding in ("fp8", "fp8fnuz")
    for power in (True, False)
    for name, make in {
        "index_fp8": lambda encoding, power: index_fp8(64, encoding=encoding, power_of_two=power),
        "fp8_ds_mla": lambda encoding, power: fp8_ds_mla(256, 16, encoding=encoding, power_of_two=power),
    }.items()
}
ROWS = 6


def row(number, width):
    """Whole-number arithmetic only: column j of row i is ±((7j + 5i) mod 23 − 11) · 2^(…), a wide and exact range."""
    columns = torch.arange(width)
    values = ((7 * columns + 5 * number) % 23 - 11).float()
    exponents = (columns * (number + 1) // 8) % 9 - 4 if number else torch.zeros(width, dtype=torch.int64)
    values = torch.ldexp(values, exponents)
    return values * {3: 0.0, 4: 2.0**-20, 5: 2.0**7}.get(number, 1.0)


def cache_rows():
    """format → for each row: field → hexadecimal bytes."""
    return {
        name: [
            {field: coded.hex() for field, coded in encode_row(row(number, cache_format.width), cache_format).items()}
            for number in range(ROWS)
        ]
        for name, cache_format in FORMATS.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(cache_rows(), indent=1) + "\n")
