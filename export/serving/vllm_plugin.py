"""The vLLM plugin: the quantisation method ``tinygemm``, and Spark-X2.5 for a vLLM that does not have it.

vLLM calls ``register`` in each of its processes (entry point group ``vllm.general_plugins``); every import that costs
something happens inside it.
"""

from __future__ import annotations

ARCHITECTURE = "Spark2_5ForCausalLM"


def register() -> None:
    """Registers what this vLLM lacks; calling it again changes nothing."""
    _register_quantization()
    _register_spark()
    _install_compile_cache()


def _register_quantization() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if "tinygemm" not in QUANTIZATION_METHODS:
        from export.serving.tinygemm_vllm import TinygemmConfig

        register_quantization_config("tinygemm")(TinygemmConfig)


def _register_spark() -> None:
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        # Its import registers the configuration with transformers.
        import models.spark2_5  # noqa: F401

        ModelRegistry.register_model(ARCHITECTURE, f"export.serving.spark2_5_vllm:{ARCHITECTURE}")


def _install_compile_cache() -> None:
    from vllm.platforms import current_platform

    from export.serving.switches import COMPILE_CACHE

    if current_platform.is_cpu() and COMPILE_CACHE.on():
        from export.serving.compile_cache import install

        install()
