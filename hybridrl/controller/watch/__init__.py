"""Detection of ranks that stall, die or are stopped, and cleaning up after them."""
