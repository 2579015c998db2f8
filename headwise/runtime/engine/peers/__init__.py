"""Blocks between engines: `lending` to others, `loads` from others, over the connections of `connections`."""
