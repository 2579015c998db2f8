"""ZeroMQ contexts that the garbage collector leaves alone, a bound socket that no client can fill up, and connections
that are passed on.
"""
