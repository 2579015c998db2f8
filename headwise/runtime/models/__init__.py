"""Model definitions, each written once over `runtime.ops`."""
