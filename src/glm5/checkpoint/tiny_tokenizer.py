"""The tokenizer of a tiny checkpoint: one token per byte, and the family's special tokens."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
# Tokens that end a turn in the published models.
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
PAD_TOKEN = "<|endoftext|>"

# An assistant turn, with the token that ends it, is what training learns from.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- generation %}
            {{- message.content + '<|endoftext|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


def tiny_tokenizer_files(max_length: int) -> dict[str, str]:
    """The files that `AutoTokenizer` reads, by name."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS_TOKENS[0],
        "pad_token": PAD_TOKEN,
        "extra_special_tokens": [t for t in SPECIAL_TOKENS if t != PAD_TOKEN],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
    }
    return {
        "tokenizer.json": build_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: ids 0 to 255 are the bytes, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer
