"""Number formats, and the weights of linear layers from a checkpoint."""
