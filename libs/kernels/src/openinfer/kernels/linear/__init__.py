"""Products with the weight of a linear layer, as commands."""
