"""The attention store: an index of which engine holds which prefix, kept true by flushes over ZeroMQ."""
