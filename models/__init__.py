"""What is known about model families: sources, checkpoints, fused projections and reference implementations."""
