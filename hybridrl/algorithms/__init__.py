"""Advantages, losses and KL estimators: pure functions on tensors [B, T]."""
