"""Runs what is in `gpu/`: see `gpu/checks.py`, and `gpu_checks.sh` for all of it in one go."""

from __future__ import annotations

import sys

from gpu.checks import main

if __name__ == "__main__":
    sys.exit(main())
