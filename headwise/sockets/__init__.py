"""ZeroMQ contexts that the garbage collector leaves alone, and bound sockets that no stranger fills."""
