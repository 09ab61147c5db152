"""How a gradient is run: eager, compiled, or captured in a CUDA graph."""
