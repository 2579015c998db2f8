"""The ``headwise`` command."""
