"""All data observed so far, and how meta-batches are drawn from it."""
