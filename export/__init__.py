"""Layouts of quantised checkpoints: a file each with pack and exact unpack, and artifacts built from them."""
