"""In which memory of an engine a leased block lies."""

HOST, DEVICE = 0, 1
