"""``python -m headwise``."""

from __future__ import annotations

from headwise.runtime.cli.app import main

if __name__ == "__main__":
    main()
