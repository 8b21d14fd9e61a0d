from __future__ import annotations

from legato.data import ChatFormatter, Example, Message, marked_sample
from tests.helpers import tiny


def test_trained_text_is_green_and_an_emoji_stays_whole() -> None:
    tokenizer = tiny.build_tokenizer()
    messages = (Message("user", "Hi"), Message("assistant", "\U0001f600"))
    (sample,) = ChatFormatter(tokenizer).format([Example("a:1", "a:1", messages)])[0]
    text = marked_sample(sample, tokenizer)
    plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\U0001f600<|im_end|>"
    assert text.plain == plain
    spans = [(str(span.style), text.plain[span.start : span.end]) for span in text.spans]
    assert spans == [("dim", plain[:-11]), ("bold green", "\U0001f600<|im_end|>")]
