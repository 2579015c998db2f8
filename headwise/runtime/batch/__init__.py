"""Files of requests, answered in an order in which neighbours share what is cached."""
