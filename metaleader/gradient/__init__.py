"""The adaptation step and the meta-gradient, as pure functions of a loss."""
