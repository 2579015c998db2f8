"""ZeroMQ contexts that the garbage collector leaves alone, and a bound socket that no client can fill up."""
