"""The Ray actors: thin shells around runtime and storage objects."""
