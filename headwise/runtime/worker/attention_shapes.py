"""What a model's layers ask of the attention kernels of a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from headwise.cache_controller.layout import BlockLayout
from headwise.kernels.cuda.attention import AttentionShape
from headwise.runtime.config.model_card import ModelCard


def attention_shapes(card: ModelCard, q_dtype: str) -> Iterator[tuple[BlockLayout, AttentionShape]]:
    """Of each kind of layer, once: its blocks, and how it attends over them, with queries of ``q_dtype``.

    On every rank alike: ranks are dealt KV heads, with the query heads that share them.
    """
    config, known = card.config, set()
    for layer, layout in enumerate(card.layouts):
        kv_heads = config.heads_of(layer).kv_heads
        shape = AttentionShape.of(
            layout,
            config.num_heads,
            kv_heads,
            q_dtype,
            config.attention_softcap,
            sink_logits=config.sink_logits,
            chunked=config.chunk > 0,
        )
        if shape not in known:
            known.add(shape)
            yield layout, shape
