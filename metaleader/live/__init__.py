"""The durable form of a learner: a session in a folder, its journal, checkpoints and recovery."""
