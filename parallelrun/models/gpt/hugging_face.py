"""The classes of transformers that compute what a gpt does under some of its options."""

from parallelrun.models.gpt.dense_families import Gpt2, Llama, Mistral, Olmo2, Phi3
from parallelrun.models.gpt.expert_families import Glm4Moe, Mixtral
from parallelrun.models.gpt.latent_families import DeepseekV2, DeepseekV3
from parallelrun.models.gpt.qwen_families import Qwen2, Qwen2Moe, Qwen3, Qwen3Moe
from parallelrun.models.gpt.windowed_families import Gemma2, Gemma3, GptOss

FAMILIES = (
    Gpt2(), Llama(), Mistral(), Phi3(), Olmo2(), Mixtral(), Glm4Moe(), DeepseekV3(), DeepseekV2(), Qwen2(), Qwen3(),
    Qwen2Moe(), Qwen3Moe(), Gemma2(), Gemma3(), GptOss(),
)  # fmt: skip
