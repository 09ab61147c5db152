"""One learner on several processes of torch.distributed, with the same bits for every number of processes."""
