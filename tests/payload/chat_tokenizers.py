"""Real tokenizers, trained in milliseconds, and chat templates that behave as those of known families do."""

from collections.abc import Iterable
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

MAKE: Any = PreTrainedTokenizerFast  # whose constructor has no annotations
TEXT = [
    "the answer is yes and the question was what is it",
    "1 + 1 = 2 <html>\n\n",
    "Read and think: über 🐍",
]

# Every turn alike, with a default system message; SmolLM2 and Qwen2.5 do so.
CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\n' + 'Be kind.' + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The answers marked, as few templates do.
MARKED = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Thoughts stay in the turns after the last question and are dropped from earlier ones; without thinking the
# prompt holds empty ones. Qwen3 does so. With `opens_thoughts` the prompt begins them, as Qwen3.5 does.
THINKING = """
{%- set last = namespace(question=0) %}
{%- for message in messages if message.role == 'user' %}{% set last.question = messages.index(message) %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- set thoughts, said = '', message.content %}
{%- if '</think>' in said %}
    {%- set thoughts = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}
    {%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if message.role == 'assistant' and loop.index0 > last.question %}
    {{- '<think>\n' + thoughts + '\n</think>\n\n' }}
{%- endif %}
{{- said }}
{%- if message.tool_calls %}{{ '<tool_call>' + message.tool_calls[0].name + '</tool_call>' }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}
    {%- elif opens_thoughts is defined %}{{ '<think>\n' }}{% endif %}
{%- endif %}"""
OPENING = "{%- set opens_thoughts = true %}" + THINKING

# A beginning-of-text token, words in front of turns, an end of text behind each answer; answers trimmed.
INSTRUCT = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

# Without a question to answer, the end of text stands behind everything; Phi-3 does so.
ENDING = """
{%- for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# No special token anywhere.
PLAIN = """
{%- for message in messages %}{{ message.role.upper() + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def bytes_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, as GPT-2, Qwen and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(f"<{name}>") for name in ("think", "/think", "tool_call", "/tool_call")])
    made: PreTrainedTokenizerFast = MAKE(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
    )
    return made


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: Iterable[int]) -> str:
    """Return the text of tokens, special ones included."""
    text = tokenizer.decode([int(token) for token in tokens])
    assert isinstance(text, str)
    return text


def words_tokenizer(template: str | None = INSTRUCT) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words begin with their space, and its texts with a token, as Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([*TEXT, "[INST] [/INST]"], trainer)
    begun = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begun])
    made: PreTrainedTokenizerFast = MAKE(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=template,
    )
    return made
