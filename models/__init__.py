"""What is known about model families: sources, checkpoints, fused projections and reference implementations.

``import models`` registers the model classes that transformers lacks (Spark-X2.5) with its Auto classes: whoever
imports anything of this package may load such a checkpoint with ``AutoModelForCausalLM`` at once.
"""

import models.spark2_5  # noqa: F401
