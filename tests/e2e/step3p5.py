"""Step-3.5 with a head: transformers 5.17 has the text model alone. Saves and loads tensors under published names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """The text model and a head."""

    config_class = Step3p7TextConfig
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Step3p7TextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **options: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids, **options)
        logits = self.lm_head(found.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=found.past_key_values)


# Of the whole model's, those that rename and join experts; the others are about the parts beside the text.
EXPERTS = [
    conversion
    for conversion in get_checkpoint_conversion_mapping("step3p7")
    if any("moe" in pattern or "share_expert" in pattern for pattern in conversion.source_patterns)
]
register_checkpoint_conversion_mapping("Step3p5ForCausalLM", EXPERTS)
