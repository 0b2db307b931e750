"""Primitives of training as a service: gradients, optimizer steps, samples, saved states."""
