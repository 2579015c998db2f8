"""`ray.remote` as an untyped decorator of actors: Ray's own types lack some options, and the result's type."""

from __future__ import annotations

from typing import Any

import ray

remote: Any = ray.remote
