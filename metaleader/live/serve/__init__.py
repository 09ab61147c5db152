"""A session over HTTP: the Open Inference Protocol for predictions, and calls that observe, label and forget."""
