"""What every backend shares: the memory budget, plans, accumulation rules and the workspace inside grad_weight."""
