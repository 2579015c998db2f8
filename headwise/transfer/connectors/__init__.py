"""How one worker reads what another worker has on its host: the contract in `base`, one module per transport."""
