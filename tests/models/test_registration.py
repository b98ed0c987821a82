"""Spark-X2.5 is known to transformers' Auto classes as soon as the package is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_importing_models_registers_spark_with_the_auto_classes() -> None:
    code = (
        "import models; from transformers import AutoConfig, AutoModelForCausalLM;"
        "print(type(AutoConfig.for_model('spark2_5')).__name__,"
        " AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model('spark2_5'))].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Spark2_5Config", "Spark2_5ForCausalLM"]
