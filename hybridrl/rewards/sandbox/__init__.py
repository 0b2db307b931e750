"""The sandbox in which code rewards run programs."""
