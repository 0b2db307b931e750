"""Times of a step: phases, timeline, throughput, profiles."""
