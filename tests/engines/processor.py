"""What tests of vLLM's own 4-bit kernels are marked with: processors without AVX-512 have them in no build of vLLM."""

from __future__ import annotations

import platform

import pytest

from validate.engines.run import X86, has_avx512

BUILT = platform.machine().lower() not in X86 or has_avx512()
WNA16 = pytest.mark.skipif(not BUILT, reason="vLLM's kernel for GPTQ and AWQ needs a processor with AVX-512")
