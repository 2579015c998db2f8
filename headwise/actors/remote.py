"""`ray.remote` as a decorator of actors: Ray's own types know neither all of its options nor what comes of it."""

from __future__ import annotations

from typing import Any

import ray

remote: Any = ray.remote
