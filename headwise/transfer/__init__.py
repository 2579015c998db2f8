"""Copies between the tiers of the cache, beside the forward pass (`transfer_manager`), on streams (`base`)."""
