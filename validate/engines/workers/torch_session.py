"""What the engines have in common that give a torch model with transformers' interface."""

from __future__ import annotations

from typing import Any

import torch


class TorchSession:
    """See worker.Session."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def score(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.model(input_ids=window[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float(), -1)
        best = logprobs.max(-1)
        return logprobs.gather(1, window[1:, None])[:, 0], best.indices, best.values

    @torch.no_grad()
    def continue_greedily(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        output: torch.Tensor = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            # Checkpoints for chats prefer others, which no scoring of text knows.
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        return output[:, prompts.shape[1] :].contiguous()

    def kernels(self) -> dict[str, str]:
        return {
            name.rpartition(".")[2]: type(module).__name__
            for name, module in self.model.named_modules()
            if "Linear" in type(module).__name__ and not isinstance(module, torch.nn.Linear)
        }

    def close(self) -> None:
        del self.model
