"""What engines need to load tinygemm artifacts.

Importing this package registers ``quant_method: tinygemm`` with transformers, so that
``AutoModelForCausalLM.from_pretrained`` takes an artifact's folder. vLLM finds its plugin through an entry point.
"""

import export.serving.transformers_loader  # noqa: F401
