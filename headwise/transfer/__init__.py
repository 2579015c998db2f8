"""Copies between the tiers of the cache, beside the forward pass, on streams (`base`).

device <-> host: `transfer_manager`; host <-> storage: `storage_manager`.
"""
