"""Vision towers: what a model's first layer gets of an image. `base` is the contract; a family is a file of its own."""
