"""The attention store: an index of which node holds which prefix."""
