"""What `/metrics` tells, as Ray's own metrics: in its dashboard, and where Prometheus reads the cluster's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from ray.util.metrics import Gauge

from headwise.errors import HeadwiseError

log = logging.getLogger(__name__)

PUBLISH_S = 5.0
"""Ray takes its metrics from processes every 10 s."""
_JOIN_S = 2.0


class RayMetrics:
    """Sets gauges of Ray to the numbers of a source, every `PUBLISH_S`, on a thread of its own, from the start on.

    Every sample becomes a gauge of its own name (`headwise_..._total`, `..._bucket`), also of counters and histograms:
    they are counted already, and Ray's counters cannot be set. Ray puts ``ray_`` before the names, and the labels get
    one more, ``deployment``: several of them may share a cluster.

    collect: the metrics of this moment. It may raise `HeadwiseError`: then nothing is set this time
    """

    def __init__(self, deployment: str, collect: Callable[[], Iterable[Metric]]) -> None:
        self._deployment = deployment
        self._collect = collect
        self._gauges: dict[str, Gauge] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise-ray-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Set nothing any more. Idempotent."""
        self._stopping.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        is_told = False
        while not self._stopping.wait(PUBLISH_S):
            try:
                self._publish()
                is_told = False
            except HeadwiseError:
                continue  # whoever was asked does not answer now
            except Exception:
                if not is_told:
                    log.exception(
                        "metrics cannot be given to Ray, which is tried again; /metrics of HTTP servers has them"
                    )
                is_told = True

    def _publish(self) -> None:
        for family in self._collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if sample.name not in self._gauges:
                    tags = ("deployment", *sample.labels)
                    self._gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=tags)
                self._gauges[sample.name].set(sample.value, {"deployment": self._deployment, **sample.labels})
