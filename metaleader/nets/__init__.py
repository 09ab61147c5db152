"""Networks as pure functions of their parameters."""
