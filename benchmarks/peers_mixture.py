"""`peers.py` for a mixture of experts of random numbers, which all runtimes read: see `runtimes.random_mixture`.

    python benchmarks/peers_mixture.py [--quick] [--rounds 3] [--engine KEY=VALUE]

headwise and vLLM in bfloat16, and headwise and llama.cpp from the same GGUF file. Options and the last line are those
of `peers.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import peers
from runtimes.model_files import MIXTURE

FIXED = ("--model", MIXTURE, "--no-long", "--engine", "dtype=bfloat16")


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    is_said = {"--quick", "--smoke", "--only"} & {*given}
    named = [] if is_said else [word for name in peers.QUICK_PEERS for word in ("--only", name)]
    peers.main([*FIXED, *named, *given])


if __name__ == "__main__":
    main()
