"""vLLM's OpenAI server with matrix products of one shape; its child processes import this file, and so have them too.

Run with the arguments of vllm.entrypoints.openai.api_server.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

from soak import fix_product_shapes

fix_product_shapes()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
