"""`peers.py` for a model with state space models (Mamba-2), of random numbers: see `runtimes.random_state_space`.

    python benchmarks/peers_state_space.py [--quick] [--rounds 3] [--engine KEY=VALUE]

headwise in bfloat16, and headwise and llama.cpp from the same GGUF file: vLLM 0.32 does not load such a model on a CPU.
Options and the last line are those of `peers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import peers
from runtimes.model_files import STATE_SPACE


def main(arguments: Sequence[str] | None = None) -> None:
    peers.of_random_model(STATE_SPACE, ["llamacpp"], arguments)


if __name__ == "__main__":
    main()
