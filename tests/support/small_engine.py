"""What engines are in tests of what is around them: soon there, and with the references' tokens."""

from __future__ import annotations

from headwise import EngineConfig

SMALL = EngineConfig(
    port=0,
    max_model_len=512,
    kv_cache="64MiB",
    block_size=16,
    cpu_threads=1,
    tokenizer_processes=1,
    dtype="float32",
    weights_dtype="gguf",  # `sure_answers` in a third of the time
    index_timeout_s=5.0,  # a machine that is busy may keep it from answering
)

TINY = EngineConfig(
    kv_cache="4MiB",
    max_model_len=512,
    block_size=8,
    dtype="float32",
    weights_dtype="float32",
    kv_dtype="float32",
    cpu_threads=1,
)
"""Of tiny models, whose tokens are compared."""
