"""The commands beside training: export, eval, replay; what they have in common is in `running`."""
