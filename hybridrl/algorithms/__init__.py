"""Advantages, losses, KL estimators and corrections: pure functions on tensors."""
