"""Chat templates of nine well-known shapes, in our own words, each with a fitting tokenizer."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from legato.data import ChatFormatter, Example, Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>\n' + messages[0].content +"
    " '\n<</SYS>>\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '')"
    " + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if loop.last and system is defined %}[INST] {{ system }}\n\n{{ m.content }}[/INST]"
    "{% else %}[INST] {{ m.content }}[/INST]{% endif %}"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# As Qwen3's does: a thought, be it empty, stands before the last answer and before answers behind
# the last question that have one; those of earlier questions lose theirs.
QWEN_THINKING = (
    "{% set ns = namespace(asked=messages | length - 1) %}{% set system = ''%}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}"
    "{% if tools %}<|im_start|>system\n{{ system + '\n\n' if system }}# Tools\n<tools>"
    "{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ system }}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>')"
    " %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ '\n' if content or not loop.first }}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif not (loop.first and m.role == 'system') %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# The token that opens the next turn stops this one: the user's, or that of a tool's result.
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "<|{{ 'observation' if m.role == 'tool' else m.role }}|>"
    "{% for c in m.tool_calls %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
    "{% else %}{{ '\n' + m.content }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'system' %}{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A template, its control tokens, and which of them stop generation."""

    template: str
    control: tuple[str, ...]
    eos: str
    bos: str | None = None
    more_stops: tuple[str, ...] = ()
    is_metaspace: bool = False

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(self)

    def stop_ids(self) -> list[int]:
        tokenizer = self.tokenizer()
        return [tokenizer.convert_tokens_to_ids(token) for token in (self.eos, *self.more_stops)]


SHAPES = {
    "chatml": Shape(CHATML, ("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"),
    "llama2": Shape(LLAMA2, ("<s>", "</s>"), eos="</s>", bos="<s>", is_metaspace=True),
    "llama3": Shape(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Shape(
        MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), eos="</s>", bos="<s>", is_metaspace=True
    ),
    "gemma": Shape(
        GEMMA,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        bos="<bos>",
        more_stops=("<end_of_turn>",),
    ),
    "qwen": Shape(QWEN_THINKING, ("<|im_start|>", "<|im_end|>"), eos="<|im_end|>"),
    "glm": Shape(
        GLM,
        (
            *("[gMASK]", "<sop>", "<|endoftext|>"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        eos="<|endoftext|>",
        more_stops=("<|user|>", "<|observation|>"),
    ),
    "phi": Shape(
        PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        more_stops=("<|end|>",),
    ),
    "deepseek": Shape(
        DEEPSEEK, ("<bos>", "<eos>", "<|User|>", "<|Assistant|>"), eos="<eos>", bos="<bos>"
    ),
}

# Words and line breaks that merge, so that tokens span more than a character.
CORPUS = ["Hello there!\n\nHow are you?\n\n\nI am well, thank you. The answer is yes.\n"] * 40


@functools.cache
def build_tokenizer(shape: Shape) -> PreTrainedTokenizerFast:
    """A BPE tokenizer trained on a few words: byte-level, or metaspace with bytes as fallback."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_metaspace() if shape.is_metaspace else _byte_level(),
        eos_token=shape.eos,
        bos_token=shape.bos,
        additional_special_tokens=list(shape.control),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = shape.template
    return tokenizer


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, pre_tokenizers.ByteLevel.alphabet())
    return backend


def _metaspace() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _train(trained, [chr(code) for code in range(33, 127)])
    model = json.loads(trained.to_str())["model"]
    byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab = byte_tokens | {token: 256 + id_ for token, id_ in model["vocab"].items()}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = trained.pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _train(backend: Tokenizer, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 80, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)


def formatter(name: str, **options: object) -> ChatFormatter:
    shape = SHAPES[name]
    return ChatFormatter(shape.tokenizer(), **({"eos_ids": shape.stop_ids()} | options))  # type: ignore[arg-type]


def example(*messages: Message) -> Example:
    return Example("chats.jsonl:1", "data/chats.jsonl:1", messages)
