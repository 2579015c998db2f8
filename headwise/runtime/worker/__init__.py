"""One tensor-parallel rank: device, graphs, sampler, copies to and from the host."""
