"""Small tokenizers of the two kinds that Llama-family checkpoints have, trained on a few sentences."""

from pathlib import Path

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

TEXT = (
    "Tom has 12 apples and buys 3 bags with 5 apples each. Stop here, please!\n",
    "Ein Känguru trinkt süßen Tee für 3 € im Café. STOP\n\n",
    "日本語のテキスト, 中文, русский, emoji 🙂🙃 and 👩‍👩‍👧.\n",
)
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|return|>", "<|call|>")
THINK = ("<think>", "</think>")
# Of the two protocols, in short: the date and an argument in the first message, the reasoning effort, open reasoning.
HARMONY_TEMPLATE = (
    "{%- macro opening() -%}Date: {{ strftime_now('%Y-%m-%d') }}. Effort: {{ reasoning_effort | default('medium') }}"
    "{%- endmacro -%}<|start|>system<|message|>{{ opening() }}<|end|>"
    "{%- for message in messages -%}<|start|>{{ message.role }}"
    "{%- if message.role == 'assistant' -%}<|channel|>final{%- endif -%}<|message|>{{ message.content }}<|end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
THINK_TEMPLATE = TEMPLATE + (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens is defined and opens %}<think>\n{% endif %}{% endif %}"
)
CHANNEL = ("<bos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>")
# Of Gemma 4 in short: an empty thought where there is to be none
CHANNEL_TEMPLATE = (
    "<bos>{% if enable_thinking is defined and enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}"
    "{% for message in messages %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n"
    "{% if not (enable_thinking is defined and enable_thinking) %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)
_SPECIAL = ["<s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]


def write_harmony(path: Path, chat_template: str = HARMONY_TEMPLATE) -> Path:
    """A tokenizer with the special tokens of harmony."""
    return write_byte_level(path, chat_template=chat_template, special=HARMONY)


def write_think(path: Path, chat_template: str = THINK_TEMPLATE) -> Path:
    """A tokenizer with the tokens of Qwen3, which are not special there."""
    return write_byte_level(path, chat_template=chat_template, added=THINK)


def write_channel(path: Path, chat_template: str = CHANNEL_TEMPLATE) -> Path:
    """A tokenizer with the special tokens of Gemma 4, which adds none to a text, as that of its 12B."""
    return write_byte_level(path, chat_template=chat_template, special=CHANNEL, bos="<bos>", adds_bos=False)


def write_byte_level(
    path: Path,
    *,
    chat_template: str | None = TEMPLATE,
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
    bos: str = "<s>",
    adds_bos: bool = True,
) -> Path:
    """Bytes as characters, as in Llama 3 and Qwen: a character outside ASCII is split over tokens.

    ``special`` and ``added`` are further tokens at the end of the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return _save(tokenizer, path, chat_template, bos, adds_bos)


def write_byte_fallback(path: Path) -> Path:
    """SentencePiece, as in Llama 2 and Vicuna: characters without a piece are spelled in byte tokens."""
    pieces = ["<unk>", *_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted(
        {character for character in "".join(TEXT) if character.isascii() and character.isprintable()} - {" "}
    )
    merges = [("t", "o"), ("to", "p"), ("▁", "a"), ("▁", "S"), ("a", "p"), ("▁S", "top"), ("e", "r")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(_SPECIAL)
    return _save(tokenizer, path, TEMPLATE)


def _save(
    tokenizer: Tokenizer, path: Path, chat_template: str | None, bos: str = "<s>", adds_bos: bool = True
) -> Path:
    from transformers import PreTrainedTokenizerFast  # not while tests are collected

    if adds_bos:
        token = bos, tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[token])
    pretrained = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="<|end|>")
    pretrained.chat_template = chat_template
    pretrained.save_pretrained(path)
    return path
