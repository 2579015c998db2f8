"""`peers.py` for a mixture of experts of random numbers, which all runtimes read: see `runtimes.random_mixture`.

    python benchmarks/peers_mixture.py [--quick] [--rounds 3] [--engine KEY=VALUE]

headwise and vLLM in bfloat16, and headwise and llama.cpp from the same GGUF file. Options and the last line are those
of `peers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import peers
from runtimes.model_files import MIXTURE


def main(arguments: Sequence[str] | None = None) -> None:
    peers.of_random_model(MIXTURE, peers.QUICK_PEERS, arguments)


if __name__ == "__main__":
    main()
