"""`peers.py` for a model with gated delta-nets, of random numbers: see `runtimes.random_hybrid`.

    python benchmarks/peers_hybrid.py [--quick] [--rounds 3] [--engine KEY=VALUE]

headwise in bfloat16, and headwise and llama.cpp from the same GGUF file: vLLM 0.32 does not load such a model on a CPU.
Options and the last line are those of `peers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import peers
from runtimes.model_files import HYBRID


def main(arguments: Sequence[str] | None = None) -> None:
    peers.of_random_model(HYBRID, ["llamacpp"], arguments)


if __name__ == "__main__":
    main()
