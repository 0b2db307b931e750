"""Ray itself: runtime, nodes, object store. Only controller/ imports ray."""
