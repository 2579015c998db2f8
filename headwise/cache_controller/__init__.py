"""The head-wise KV cache: groups of heads, blocks, the prefix tree and who owns what."""
