"""Deals a model's layers to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence


def deal_layers(cache_layers: Sequence[int], stages: int) -> tuple[range, ...]:
    """Neighbouring layers for each of so many stages, in order: equally many, or one more on the first ones, as the
    last has the LM head. Layers that use something of an earlier one stay with it, so some may have more or fewer.

    cache_layers: of each layer, whose cache, or whose indexer's choice, it uses: its own, or an earlier one's

    Raises:
        ValueError: there are more stages than that leaves room for.
    """
    layers = len(cache_layers)
    cuts = [cut for cut in range(1, layers) if min(cache_layers[cut:]) >= cut]
    if stages > len(cuts) + 1:
        raise ValueError(
            f"pipeline_parallel_size {stages} is too much: {layers} layers can be dealt to {len(cuts) + 1} stages at "
            "most that share neither a cache nor an indexer"
        )
    chosen: list[int] = []
    for stage in range(1, stages):
        left = cuts[len(chosen) and cuts.index(chosen[-1]) + 1 : len(cuts) - (stages - 1 - stage)]
        even = layers // stages * stage + min(stage, layers % stages)
        chosen.append(min(left, key=lambda cut: (abs(cut - even), cut)))
    return tuple(range(start, stop) for start, stop in zip([0, *chosen], [*chosen, layers], strict=True))
