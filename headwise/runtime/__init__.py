"""The serving runtime, by who runs it; what all of them share is in `config` and `protocol`."""
