"""Artifacts run by the engines that will serve them, each in its own interpreter, and compared with our own scorer."""
